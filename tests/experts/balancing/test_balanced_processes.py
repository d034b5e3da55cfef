"""Experts move between real processes while ranks are killed, at random moments and at every point of a move."""

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
from tests.recovery import balanced_rank, compared_placements

ALL = (0, 1, 2, 3)
POINTS = [point for point in faults.PLACES if point.startswith("balance.")]


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compared_placements.CHECKPOINT, str(model.save_checkpoint(tmp_path / "model")))


def switches(supervisor: Supervisor, rank: int) -> int:
    incarnation = record(supervisor).view.incarnations[rank]
    path = compared_placements.switched_path(supervisor.directory.path, rank, incarnation)
    return path.stat().st_size if path.exists() else 0


async def until_all_switch(supervisor: Supervisor) -> None:
    await until(supervisor, runs_with(supervisor, ALL))
    before = {rank: switches(supervisor, rank) for rank in ALL}
    async with asyncio.timeout(PATIENCE):
        while not all(switches(supervisor, rank) > before[rank] for rank in ALL):
            await asyncio.sleep(0.02)


def check(supervisor: Supervisor) -> None:
    found = [compared_placements.mismatch_path(supervisor.directory.path, rank) for rank in ALL]
    assert [path.read_text() for path in found if path.exists()] == []
    check_journals(supervisor)


@pytest.mark.long
def test_experts_move_while_ranks_are_killed_at_random_moments() -> None:
    choose = random.Random(20261118)

    async def body() -> None:
        async with supervised(balanced_rank.main, forked=True) as supervisor:
            await until_all_switch(supervisor)
            for _ in range(8):
                await asyncio.sleep(choose.uniform(0.0, 0.6))
                for rank in choose.sample(ALL, choose.choice((1, 1, 2))):
                    if (pid := supervisor.pids.get(rank)) is not None:
                        with contextlib.suppress(ProcessLookupError):  # it was killed already and is yet to be reaped
                            os.kill(pid, signal.SIGKILL)
                if choose.random() < 0.6:
                    await until(supervisor, runs_with(supervisor, ALL))
            await until_all_switch(supervisor)
            check(supervisor)

    asyncio.run(body())


def test_a_rank_dies_at_each_point_of_a_move(tmp_path: Path) -> None:
    place = tmp_path / "d"
    place.mkdir(mode=0o700)
    orders.allow_in(place)
    target = Target(place)

    async def body() -> None:
        directory = DirectorySettings(place, remove=True)
        async with supervised(balanced_rank.main, forked=True, directory=directory) as supervisor:
            await until_all_switch(supervisor)
            for number, point in enumerate(POINTS):
                rank = number % len(ALL)
                life = record(supervisor).view.incarnations[rank]
                await asyncio.to_thread(target.arm, rank, point, "kill")
                fired = await asyncio.to_thread(target.wait_until_fired, rank, point, PATIENCE)
                assert fired, f"never passed: {point}"
                await until(supervisor, lambda: record(supervisor).view.incarnations[rank] > life)  # noqa: B023
                await until_all_switch(supervisor)
            check(supervisor)

    asyncio.run(body())
