"""Real processes bring experts in behind their steps while ranks are killed, at every point of it and at random moments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from eep import faults
from eep.control.supervisor.settings import DirectorySettings
from eep.control.supervisor.supervisor import Supervisor
from eep.drill.faults import Target
from eep.faults import orders
from tests.control.harness import PATIENCE, record, runs_with, supervised, until
from tests.control.test_data_plane import check_journals
from tests.experts import model
from tests.recovery import behind_rank, compared_placements

ALL = (0, 1, 2, 3)
POINTS = [point for point in faults.PLACES if point.startswith("behind.")]


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compared_placements.CHECKPOINT, str(model.save_checkpoint(tmp_path / "model")))


def kill(supervisor: Supervisor, rank: int) -> None:
    if (pid := supervisor.pids.get(rank)) is not None:
        with contextlib.suppress(ProcessLookupError):  # it was killed already and is yet to be reaped
            os.kill(pid, signal.SIGKILL)


def check(supervisor: Supervisor) -> None:
    found = [compared_placements.mismatch_path(supervisor.directory.path, rank) for rank in ALL]
    assert [path.read_text() for path in found if path.exists()] == []
    check_journals(supervisor)


def caught_up(supervisor: Supervisor) -> int:
    """How often ranks have served all experts again after they had lacked some."""
    return sum(path.stat().st_size for path in supervisor.directory.path.glob("switched-*"))


def test_a_rank_dies_at_each_point(tmp_path: Path) -> None:
    """A loss may leave the armed rank without anything to bring in, or be over too soon: then another one follows."""
    place = tmp_path / "d"
    place.mkdir(mode=0o700)
    orders.allow_in(place)
    target = Target(place)

    async def body() -> None:
        directory = DirectorySettings(place, remove=True)
        async with supervised(behind_rank.main, forked=True, directory=directory) as supervisor:
            for number, point in enumerate(POINTS):
                rank, tries = number % len(ALL), 0
                await until(supervisor, runs_with(supervisor, ALL))
                await asyncio.to_thread(target.arm, rank, point, "kill")
                async with asyncio.timeout(PATIENCE):
                    fired = False
                    while not fired:
                        await until(supervisor, runs_with(supervisor, ALL))
                        tries += 1
                        kill(supervisor, (rank + 1 + tries % 3) % len(ALL))
                        fired = await asyncio.to_thread(target.wait_until_fired, rank, point, 1.0)
            await until(supervisor, runs_with(supervisor, ALL))
            assert caught_up(supervisor)
            check(supervisor)

    asyncio.run(body())


@pytest.mark.long
def test_ranks_are_killed_at_random_moments() -> None:
    choose = random.Random(20261118)

    async def body() -> None:
        async with supervised(behind_rank.main, forked=True) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            life = record(supervisor).view.epoch
            for _ in range(8):
                await asyncio.sleep(choose.uniform(0.0, 0.6))
                for rank in choose.sample(ALL, choose.choice((1, 1, 2))):
                    kill(supervisor, rank)
                if choose.random() < 0.6:
                    await until(supervisor, runs_with(supervisor, ALL))
            await until(supervisor, runs_with(supervisor, ALL))
            assert record(supervisor).view.epoch > life
            check(supervisor)

    asyncio.run(body())
