"""A rank whose process is stopped is out in under a second, and one that runs now and then is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eep.control.supervisor.stopped_watch import PAUSE, StoppedWatch, time_of_stopped
from eep.membership import Event, HostState, RankStatus, Stalled, StallKind
from eep.observe.event_log import read_events
from tests.control import ranks
from tests.control.harness import patient_policy, record, runs_with, supervised, until
from tests.membership.membership_host import Host

DEADLINE = 0.5


class WatchedHost:
    def __init__(self) -> None:
        self.state: HostState = Host(stopped_deadline=DEADLINE).run().state
        self.told: list[Event] = []

    def feed(self, event: Event) -> None:
        self.told.append(event)


def watch(seconds: float, run_time: Callable[[int, float], int | None], late: float = 0.0) -> list[Event]:
    """What a host is told after so long. ``run_time`` of a process at a time; ``late``: by how much each look is late."""
    host, now = WatchedHost(), 0.0
    looks = StoppedWatch(host, lambda: {rank: 100 + rank for rank in range(4)}, lambda pid: run_time(pid, now))
    while now <= seconds and not host.told:
        looks.look(now)
        now += PAUSE + late
    return host.told


def test_a_rank_that_stays_stopped_is_told_once_its_time_is_over() -> None:
    assert watch(DEADLINE - PAUSE, lambda pid, now: 7 if pid == 102 else None) == []
    (told,) = watch(1.0, lambda pid, now: 7 if pid == 102 else None)
    assert isinstance(told, Stalled)
    assert (told.rank, told.kind) == (2, StallKind.STOPPED)


def test_a_rank_that_runs_between_two_looks_is_slow_and_not_stopped() -> None:
    assert watch(60.0, lambda pid, now: int(now * 1e9)) == []


def test_a_rank_that_is_awake_at_a_look_begins_anew() -> None:
    assert watch(60.0, lambda pid, now: None if round(now / PAUSE) % 3 == 0 else 7) == []


def test_a_supervisor_that_was_stopped_itself_has_not_seen_a_rank_stopped_for_so_long() -> None:
    assert watch(11.0, lambda pid, now: 7, late=10.0) == []


def watched(state: HostState) -> list[Event]:
    """What a host in that state is told of rank 2, which is stopped."""
    host = WatchedHost()
    host.state = state
    looks = StoppedWatch(host, lambda: {2: 102}, lambda pid: 7)
    now = 0.0
    while now <= 2 * DEADLINE:
        looks.look(now)
        now += PAUSE
    return host.told


def test_a_rank_that_starts_is_told_too() -> None:
    starting = Host(stopped_deadline=DEADLINE).state
    assert starting.ranks[2].status is RankStatus.STARTING
    assert {told.rank for told in watched(starting) if isinstance(told, Stalled)} == {2}


def test_a_rank_that_is_being_ended_is_left_alone() -> None:
    host = Host(stopped_deadline=DEADLINE).run()
    host.feed(Stalled(2, 0, 0.6, StallKind.STOPPED))
    assert host.state.ranks[2].status is RankStatus.FENCING
    assert watched(host.state) == []


def test_the_kernel_says_whether_a_process_is_stopped(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert time_of_stopped(process.pid) is None
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        # It is told of a moment before the process leaves its processor.
        ran, before = time_of_stopped(process.pid), None
        while ran != before:
            time.sleep(0.01)
            ran, before = time_of_stopped(process.pid), ran
        assert ran is not None
        assert ran > 0
        assert time_of_stopped(process.pid) == ran
        os.kill(process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert time_of_stopped(process.pid) is None
    finally:
        process.kill()
        process.communicate()
    assert time_of_stopped(process.pid) is None


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_fenced_and_comes_back(victim: int) -> None:
    async def body() -> None:
        async with supervised(ranks.steady, policy=patient_policy(4, stopped_deadline=DEADLINE)) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1, 2, 3)))
            os.kill(supervisor.pids[victim], signal.SIGSTOP)
            await until(supervisor, lambda: record(supervisor).view.incarnations[victim] > 0)
            causes = [(line.rank, line.cause) for line in read_events(supervisor.directory.events)]
            assert any(rank == victim and "its process is stopped" in cause for rank, cause in causes)

    asyncio.run(body())


def test_a_rank_that_is_stopped_while_it_starts_is_fenced_and_comes_back() -> None:
    async def body() -> None:
        policy = patient_policy(2, stopped_deadline=DEADLINE)
        async with supervised(ranks.stops_as_it_starts, 2, policy=policy) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1)))
            causes = [line.cause for line in read_events(supervisor.directory.events) if line.rank == 1]
            assert any("its process is stopped" in cause for cause in causes)

    asyncio.run(body())
