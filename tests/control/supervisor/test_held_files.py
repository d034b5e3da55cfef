"""The supervisor holds the device files of a rank for a while after the rank has ended."""

from __future__ import annotations

import asyncio
import fcntl
from pathlib import Path

import pytest

from eep.control.supervisor import held_files
from eep.data_plane.device_files import MOST, open_device_files
from tests.control import ranks
from tests.control.harness import kill, record, runs_with, supervised, until


def is_open(path: Path) -> bool:
    """Whether a process still has the file that a rank had locked."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_they_outlive_the_rank_and_not_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_files, "HELD_FOR", 3600.0)

    async def body() -> list[Path]:
        async with supervised(ranks.has_a_device_file, 2) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1)))
            kill(supervisor, 1)
            # Its next life begins once the process of the first has ended.
            await until(supervisor, lambda: record(supervisor).view.incarnations[1] == 1)
            place = supervisor.directory.path
            assert is_open(place / "device-1-0")
            for name in ("device-1-0", "device-0-0", "device-1-1"):
                (tmp_path / name).hardlink_to(place / name)
            monkeypatch.setattr(held_files, "HELD_FOR", 0.0)
        return sorted(tmp_path.glob("device-*"))

    files = asyncio.run(body())
    assert len(files) == 3
    assert not any(is_open(path) for path in files)


def test_they_are_let_go_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_files, "HELD_FOR", 0.05)

    async def body() -> None:
        async with supervised(ranks.has_a_device_file, 2) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1)))
            kill(supervisor, 1)
            await until(supervisor, lambda: record(supervisor).view.incarnations[1] == 1)
            while is_open(supervisor.directory.path / "device-1-0"):
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(body(), 120))


def test_a_process_finds_its_own(tmp_path: Path) -> None:
    names = ["nvidiactl", *(f"nvidia{number}" for number in range(MOST))]
    files = [(tmp_path / name).open("w") for name in names]
    with (tmp_path / "another").open("w"):
        found = open_device_files(driver=str(tmp_path / "nvidia"))
    assert found == tuple(file.fileno() for file in files[:MOST])
    for file in files:
        file.close()
    assert open_device_files(driver=str(tmp_path / "nvidia")) == ()
