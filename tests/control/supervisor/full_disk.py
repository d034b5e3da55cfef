"""Run as a process in a mount namespace of its own: kills a rank while the supervisor's directory has no room.

``python -m tests.control.supervisor.full_disk KIND DIRECTORY``. ``DIRECTORY`` is a small file system of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from eep.control.supervisor.settings import DirectorySettings
from eep.control.supervisor.supervisor import Supervisor
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.observe.event_log import read_events
from tests.control import full_disk_rank
from tests.control.harness import kill, record, runs_with, supervised, until

ALL = (0, 1, 2)
SURVIVORS = (0, 2)


def fill_blocks(place: Path) -> Callable[[], None]:
    filler = place / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler.unlink


def fill_inodes(place: Path) -> Callable[[], None]:
    made = []
    with suppress(OSError):
        while True:
            path = place / f"filler-{len(made)}"
            path.touch()
            made.append(path)

    def empty() -> None:
        for path in made:
            path.unlink()

    return empty


def make_read_only(place: Path) -> Callable[[], None]:
    """A second mount over the first: files that are open stay writable, as after an error of a disk they would not. It is
    made elsewhere, since a mount through which a file is being written cannot become read-only."""
    with tempfile.TemporaryDirectory() as aside:
        subprocess.run(["mount", "--bind", place, aside], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", aside], check=True)
        subprocess.run(["mount", "--move", aside, place], check=True)

    def undo() -> None:
        subprocess.run(["umount", "-l", place], check=True)

    return undo


KINDS = {"blocks": fill_blocks, "inodes": fill_inodes, "read-only": make_read_only}


def shown_epochs(supervisor: Supervisor) -> dict[str, int]:
    found = DirectoryRegistry(supervisor.directory.ranks / "held").scan("")
    return {key: int(value) for key, value in found.items()}


def phases(supervisor: Supervisor) -> list[str]:
    return [line.phase for line in read_events(supervisor.directory.events)]


async def main(kind: str, place: Path) -> None:
    async with supervised(
        full_disk_rank.main, ALL, forked=True, directory=DirectorySettings(place / "d", remove=True)
    ) as supervisor:
        await until(supervisor, runs_with(supervisor, ALL))
        first = {rank: supervisor.pids[rank] for rank in SURVIVORS}
        has_room = KINDS[kind](place)
        kill(supervisor, 1)
        await until(supervisor, lambda: record(supervisor).view.active == SURVIVORS)
        if kind != "blocks":  # a rank can start where files can be made, and need not hold a byte
            await until(supervisor, runs_with(supervisor, SURVIVORS))
            epoch = record(supervisor).view.epoch
            assert shown_epochs(supervisor) == {"r0.i0": epoch, "r2.i0": epoch}, (
                "survivors could not say what they hold"
            )
            await until(supervisor, lambda: "NO-ROOM" in phases(supervisor))
            has_room()
        await until(supervisor, runs_with(supervisor, ALL))
        assert {rank: supervisor.pids[rank] for rank in SURVIVORS} == first, "a survivor has ended"
        assert supervisor.state.ranks[1].failures <= 1, "a start failed for want of room"
        if kind == "blocks":
            epoch = record(supervisor).view.epoch
            assert shown_epochs(supervisor) == {"r0.i0": epoch, "r2.i0": epoch}
            has_room()
        kill(supervisor, 2)  # now all of it is written
        await until(supervisor, lambda: record(supervisor).view.active == (0, 1))
        await until(supervisor, runs_with(supervisor, ALL))
        assert len(shown_epochs(supervisor)) == 3
        seen = phases(supervisor)
        if kind != "blocks":
            assert seen.count("NO-ROOM") == seen.count("ROOM") == 1
        assert seen.count("RUN") >= 4, "lines are missing"
    assert not os.path.exists(place / "d")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
