"""``eep status`` on a real supervisor: what the next change waits for."""

from __future__ import annotations

import asyncio
import json

from eep.control.supervisor.supervisor import Supervisor
from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskStatus
from tests.control import ranks
from tests.control.harness import kill, patient_policy, runs_with, supervised, until

ALL = (0, 1, 2)


async def waiting_for(supervisor: Supervisor) -> str:
    answer = await asyncio.to_thread(ask_supervisor, supervisor.directory.path, AskStatus())
    return str(json.loads(answer.body)["waiting_for"])


def test_status_says_what_a_repair_waits_for() -> None:
    async def body() -> None:
        async with supervised(ranks.slow_repair, 3, policy=patient_policy(3, relaunch_limit=0)) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            gate = supervisor.directory.path / "closed"
            gate.touch()
            kill(supervisor, 1)
            await until(supervisor, lambda: supervisor.state.epoch == 2)
            assert await waiting_for(supervisor) == "ranks 0, 2 to settle in epoch 2"
            gate.unlink()
            await until(supervisor, runs_with(supervisor, (0, 2)))
            assert await waiting_for(supervisor) == "nothing: ranks 0, 2 run, and no other rank is on its way"

    asyncio.run(body())


def test_status_says_which_rank_is_not_ready() -> None:
    async def body() -> None:
        async with supervised(ranks.never_ready, 1) as supervisor:
            await until(supervisor, lambda: bool(supervisor.pids))
            assert await waiting_for(supervisor) == "rank 0 to get ready"

    asyncio.run(body())
