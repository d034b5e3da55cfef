"""The control plane and the data plane together: real ranks exchange tokens while others are killed and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from eep.control.supervisor.supervisor import Supervisor
from tests.control import data_plane_rank
from tests.control.harness import PATIENCE, kill, record, runs_with, supervised, until, until_gone

ALL = (0, 1, 2, 3)


def journal(supervisor: Supervisor, rank: int, incarnation: int = 0) -> list[dict[str, Any]]:
    path = Path(supervisor.directory.path) / f"journal-{rank}-{incarnation}"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


async def until_committed(supervisor: Supervisor, rank: int, epoch: int, incarnation: int = 0) -> None:
    """Wait until a rank has committed a step in this epoch or a later one."""
    async with asyncio.timeout(PATIENCE):
        while not any(line["committed"] and line["epoch"] >= epoch for line in journal(supervisor, rank, incarnation)):
            await asyncio.sleep(0.02)


def check_journals(supervisor: Supervisor) -> None:
    """Every committed step was exact, and each batch was committed once, in order: none lost, none repeated."""
    for path in Path(supervisor.directory.path).glob("journal-*"):
        rank, incarnation = (int(part) for part in path.name.split("-")[1:])
        committed = [line for line in journal(supervisor, rank, incarnation) if line["committed"]]
        assert all(line["exact"] for line in committed), f"{path.name} committed a wrong result"
        assert [line["seed"] for line in committed] == list(range(len(committed)))
        epochs = [line["epoch"] for line in committed]
        assert epochs == sorted(epochs)


@pytest.mark.parametrize(
    ("number", "victim"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 2)], ids=["rank 0 killed", "rank 2 stopped"]
)
def test_steps_stay_exact_while_a_rank_is_lost_and_replaced(number: signal.Signals, victim: int) -> None:
    async def body() -> None:
        async with supervised(data_plane_rank.main, forked=True) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            first = record(supervisor).view
            for rank in ALL:
                await until_committed(supervisor, rank, first.epoch)
            pid = supervisor.pids[victim]
            os.kill(pid, number)
            survivors = tuple(rank for rank in ALL if rank != victim)
            await until(supervisor, runs_with(supervisor, survivors))
            await until_gone([pid])
            reduced = record(supervisor).view
            for rank in survivors:
                await until_committed(supervisor, rank, reduced.epoch)
            await until(supervisor, runs_with(supervisor, ALL))
            again = record(supervisor).view
            assert again.incarnations[victim] > first.incarnations[victim]
            for rank in ALL:
                await until_committed(supervisor, rank, again.epoch, again.incarnations[rank])
            check_journals(supervisor)

    asyncio.run(body())


def test_a_joiner_that_dies_while_it_joins_does_not_hold_the_others_up() -> None:
    async def body() -> None:
        async with supervised(data_plane_rank.main, forked=True) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            kill(supervisor, 1)
            await until(supervisor, lambda: 1 not in record(supervisor).view.active)
            await until(supervisor, lambda: 1 in record(supervisor).view.active)  # agreed, and not yet running
            joined = record(supervisor).view
            kill(supervisor, 1)
            await until(supervisor, lambda: record(supervisor).view.epoch > joined.epoch)
            await until(supervisor, runs_with(supervisor, ALL))
            final = record(supervisor).view
            assert final.incarnations[1] > joined.incarnations[1]
            for rank in ALL:
                await until_committed(supervisor, rank, final.epoch, final.incarnations[rank])
            check_journals(supervisor)

    asyncio.run(body())


def test_what_is_no_control_page_is_refused() -> None:
    from eep.control.supervisor.front_desk import open_shared_page

    descriptor = os.memfd_create("not-a-page")
    with pytest.raises((ValueError, OSError, RuntimeError)):
        open_shared_page(descriptor)
