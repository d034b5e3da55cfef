"""Sessions: steps of several layers and a gather, while ranks are killed and stopped at random moments."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from tests.control import session_rank
from tests.control.harness import record, runs_with, supervised, until, until_gone
from tests.control.test_data_plane import check_journals, journal, until_committed

ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("number", "victim"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 2)], ids=["rank 0 killed", "rank 2 stopped"]
)
def test_steps_stay_exact_while_a_rank_is_lost_and_replaced(number: signal.Signals, victim: int) -> None:
    async def body() -> None:
        async with supervised(session_rank.main, forked=True) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            first = record(supervisor).view
            for rank in ALL:
                await until_committed(supervisor, rank, first.epoch)
            pid = supervisor.pids[victim]
            os.kill(pid, number)
            survivors = tuple(rank for rank in ALL if rank != victim)
            await until(supervisor, runs_with(supervisor, survivors))
            await until_gone([pid])
            for rank in survivors:
                await until_committed(supervisor, rank, record(supervisor).view.epoch)
            await until(supervisor, runs_with(supervisor, ALL))
            again = record(supervisor).view
            for rank in ALL:
                await until_committed(supervisor, rank, again.epoch, again.incarnations[rank])
            check_journals(supervisor)

    asyncio.run(body())


def test_kills_at_random_moments_up_to_three_at_once() -> None:
    seed = 20261115
    choose = random.Random(seed)

    async def body() -> None:
        async with supervised(session_rank.main, forked=True) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            for _ in range(8):
                if choose.random() < 0.6:  # else while those killed before are still coming back
                    await until(supervisor, runs_with(supervisor, ALL))
                await asyncio.sleep(choose.uniform(0.0, 0.5))
                for rank in choose.sample(ALL, choose.choice((1, 1, 1, 2, 3))):
                    if (pid := supervisor.pids.get(rank)) is not None:
                        os.kill(pid, signal.SIGKILL)
            await until(supervisor, runs_with(supervisor, ALL))
            final = record(supervisor).view
            for rank in ALL:
                await until_committed(supervisor, rank, final.epoch, final.incarnations[rank])
            check_journals(supervisor)
            lives = [(rank, life) for rank in ALL for life in range(final.incarnations[rank] + 1)]
            lines = [line for rank, life in lives for line in journal(supervisor, rank, life)]
            assert any(line["repeated"] for line in lines), f"no step was ever run again: seed {seed} tests nothing"

    asyncio.run(body())
