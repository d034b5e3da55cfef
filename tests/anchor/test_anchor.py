"""Real ranks, killed, whose memory is there for their next lives; a keeper that is killed, too."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from eep.anchor.anchor import SOCKET, Anchor, AnchorGone, HeldMemory, list_held
from eep.anchor.memory_holder import MemoryHolder
from eep.control.supervisor.supervisor import Supervisor
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError
from tests.anchor import anchored_rank
from tests.control.harness import PATIENCE, kill, record, runs_with, supervised, until

BOTH = (0, 1)


def found(supervisor: Supervisor, rank: int, life: int) -> str:
    return (supervisor.directory.path / f"found-{rank}-{life}").read_text()


async def lose(supervisor: Supervisor, rank: int, life: int) -> None:
    """And have its next life run."""
    kill(supervisor, rank)
    await until(supervisor, lambda: record(supervisor).view.incarnations[rank] > life)
    await until(supervisor, runs_with(supervisor, BOTH))


def test_the_next_life_of_a_rank_has_the_memory_of_the_last() -> None:
    async def body() -> Path:
        async with supervised(anchored_rank.main, 2, forked=True) as supervisor:
            place = supervisor.directory.path
            await until(supervisor, runs_with(supervisor, BOTH))
            assert found(supervisor, 1, 0) == f"None {[0] * 8}"
            await lose(supervisor, 1, 0)
            assert found(supervisor, 1, 1) == f"0 {[1] + [0] * 7}"
            await lose(supervisor, 1, 1)
            assert found(supervisor, 1, 2) == f"1 {[1, 2] + [0] * 6}"
            size = anchored_rank.SIZE
            assert list_held(place) == [HeldMemory(0, "kv", 0, size), HeldMemory(1, "kv", 2, size)]
            return place

    place = asyncio.run(body())
    with pytest.raises(AnchorGone, match="no process holds memory"):
        list_held(place)


def test_the_next_keeper_holds_it_again() -> None:
    async def body() -> None:
        async with supervised(anchored_rank.main, 2, forked=True) as supervisor:
            await until(supervisor, runs_with(supervisor, BOTH))
            first = supervisor.keeper_pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await until(supervisor, lambda: supervisor.keeper_pid not in (None, first))
            async with asyncio.timeout(PATIENCE):
                while len(await asyncio.to_thread(held_by, supervisor.directory.path)) < 2:
                    await asyncio.sleep(0.02)
            await lose(supervisor, 1, 0)
            assert found(supervisor, 1, 1) == f"0 {[1] + [0] * 7}"

    asyncio.run(body())


def held_by(directory: Path) -> list[HeldMemory]:
    try:
        return list_held(directory)
    except AnchorGone:
        return []


def test_without_a_keeper_memory_is_new_and_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    anchor = Anchor(tmp_path, 0, 0)
    memory, life = anchor.attach("kv", 4096, SharedMemory)
    memory.bytes_at(0, 4096)[7] = 9
    assert life is None
    assert "kv ends with this process: no process holds memory" in caplog.text
    anchor.close()


def test_a_process_that_does_not_know_its_life_only_looks(tmp_path: Path) -> None:
    holder, (told, ends) = MemoryHolder(str(tmp_path / SOCKET)), os.pipe()
    thread = threading.Thread(target=holder.wait, args=(told,), daemon=True)
    thread.start()
    live, spare = Anchor(tmp_path, 2, 4), Anchor(tmp_path, 2)
    try:
        memory, _ = live.attach("kv", 64, SharedMemory)
        memory.bytes_at(0, 64).fill_(3)
        seen, life = spare.attach("kv", 64, SharedMemory)
        assert (life, seen.bytes_at(0, 2).tolist()) == (4, [3, 3])
        with pytest.raises(EepError, match="no memory rows of 8 bytes from which a spare could start"):
            spare.attach("rows", 8, SharedMemory)
        assert list_held(tmp_path) == [HeldMemory(2, "kv", 4, 64)]
        place = SharedMemory.placeholder(32)
        live.attach("rows", 32, SharedMemory)[0].bytes_at(0, 32).fill_(8)
        spare.begin(5)
        spare.attach("rows", 32, SharedMemory, place)
        assert place.bytes_at(0, 2).tolist() == [8, 8]
        assert list_held(tmp_path) == [HeldMemory(2, "kv", 5, 64), HeldMemory(2, "rows", 5, 32)]
    finally:
        live.close()
        spare.close()
        os.close(ends)
        thread.join(10)
