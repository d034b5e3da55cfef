"""Ranks that all stand still at once are noticed by their supervisor, which replaces them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping

from eep.control.supervisor.stall_watch import StallWatch
from eep.control.supervisor.supervisor import Supervisor
from eep.control.wire.client import ask_supervisor
from eep.control.wire.messages import AskStatus
from eep.membership import Event, HostState, Stalled
from eep.observe.event_log import read_events
from tests.control import ranks
from tests.control.harness import PATIENCE, patient_policy, record, runs_with, supervised, until, until_gone
from tests.membership.membership_host import Host

ALL = (0, 1, 2, 3)
DEADLINE = 3.0


class RunningHost:
    def __init__(self) -> None:
        self.state: HostState = Host(stall_deadline=DEADLINE).run().state
        self.told: list[Event] = []

    def feed(self, event: Event) -> None:
        self.told.append(event)


def watch_for(seconds: float, words: Mapping[int, int | None], moving: int) -> RunningHost:
    """What a host is told whose ranks have these words for so long, while that of rank ``moving`` changes."""
    host, now = RunningHost(), 0.0
    watch = StallWatch(host, lambda rank: int(now * 1000) + 2 if rank == moving else words[rank])
    while now <= seconds:
        watch.look(now)
        now += 0.1
    return host


def test_a_rank_that_stands_still_is_told_and_one_that_moves_or_rests_is_not() -> None:
    host = watch_for(DEADLINE + 0.2, {0: 2, 2: None, 3: 6}, moving=1)
    assert {event.rank for event in host.told if isinstance(event, Stalled)} == {0, 3}


def test_no_rank_is_told_before_the_deadline() -> None:
    assert watch_for(DEADLINE - 0.5, {0: 2, 2: None, 3: 6}, moving=1).told == []


def test_ranks_that_are_all_stopped_are_fenced_and_come_back() -> None:
    async def body() -> None:
        async with supervised(ranks.steady, policy=patient_policy(4, stall_deadline=DEADLINE)) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            stopped = list(supervisor.pids.values())
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            await until(supervisor, lambda: min(record(supervisor).view.incarnations) > 0)
            await until(supervisor, runs_with(supervisor, ALL))
            await until_gone(stopped)
            fenced = fenced_without_progress(supervisor)
            assert fenced == set(ALL)

    asyncio.run(body())


def fenced_without_progress(supervisor: Supervisor) -> set[int | None]:
    lines = read_events(supervisor.directory.events)
    return {line.rank for line in lines if line.phase == "FENCING" and "no progress" in line.cause}


def test_a_rank_that_hangs_in_a_repair_is_fenced_and_no_other_is() -> None:
    async def body() -> None:
        async with supervised(ranks.hangs_in_repair, policy=patient_policy(4, stall_deadline=DEADLINE)) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            assert record(supervisor).view.incarnations[1] > 0, "its first life never settles"
            fenced = fenced_without_progress(supervisor)
            assert fenced == {1}

    asyncio.run(body())


def test_status_says_for_how_long_a_rank_stands_still() -> None:
    async def body() -> None:
        async with supervised(ranks.steady, 2, policy=patient_policy(2, stall_deadline=1000.0)) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1)))
            os.kill(supervisor.pids[0], signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE):
                while not (await still_for(supervisor, 0) or 0) > 2:
                    await asyncio.sleep(0.1)

    asyncio.run(body())


async def still_for(supervisor: Supervisor, rank: int) -> float | None:
    answer = await asyncio.to_thread(ask_supervisor, supervisor.directory.path, AskStatus())
    seconds: float | None = json.loads(answer.body)["ranks"][str(rank)]["still_for"]
    return seconds


def test_a_rank_that_waits_for_another_view_need_not_advance() -> None:
    async def body() -> None:
        async with supervised(ranks.waits_for_another_view, 1) as supervisor:
            await until(supervisor, runs_with(supervisor, (0,)))
            async with asyncio.timeout(PATIENCE):
                while supervisor._front_desk.progress_of(0) is not None:
                    await asyncio.sleep(0.01)

    asyncio.run(body())
