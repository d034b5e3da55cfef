"""The memory of a rank that does not come back is let go, that of others is not."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.anchor.anchor import SOCKET, Anchor, list_held
from eep.anchor.memory_holder import MemoryHolder
from eep.control.supervisor.memory_release import MemoryRelease
from eep.data_plane.memory.shm import SharedMemory
from eep.membership import RankGone


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Ranks 0 and 1 have had two lives, and memory from the second."""
    holder, (told, ends) = MemoryHolder(str(tmp_path / SOCKET)), os.pipe()
    thread = threading.Thread(target=holder.wait, args=(told,), daemon=True)
    thread.start()
    anchors = [Anchor(tmp_path, rank, 1) for rank in (0, 1)]
    for anchor in anchors:
        for name in ("kv", "journal"):
            anchor.attach(name, 4096, SharedMemory)
        anchor.close()
    yield tmp_path
    os.write(ends, b"x")
    thread.join(10)


def held_after(directory: Path, *effects: RankGone, back: tuple[int, ...] = ()) -> list[tuple[int, str]]:
    async def body() -> None:
        release = MemoryRelease(directory, lambda rank: rank in back, after=0.01)
        for effect in effects:
            release.follow(effect)
        await asyncio.sleep(0.05)

    asyncio.run(body())
    return [(each.rank, each.name) for each in list_held(directory)]


def test_a_rank_that_is_gone_for_good(directory: Path) -> None:
    assert held_after(directory, RankGone(1, 1, "a test")) == [(0, "journal"), (0, "kv")]


def test_a_rank_that_comes_back(directory: Path) -> None:
    assert len(held_after(directory, RankGone(1, 1, "a test"), back=(1,))) == 4


def test_what_a_later_life_has_stays(directory: Path) -> None:
    assert len(held_after(directory, RankGone(1, 0, "a test"))) == 4


def test_without_a_keeper_nothing_happens(tmp_path: Path) -> None:
    async def body() -> None:
        MemoryRelease(tmp_path, lambda rank: False, after=0.0).follow(RankGone(1, 1, "a test"))
        await asyncio.sleep(0.05)

    asyncio.run(body())
