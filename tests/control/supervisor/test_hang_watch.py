"""A rank that sleeps without a reason is out in under a second; one that works, or waits for something, is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from eep.control.supervisor.hang_watch import PAUSE, HangWatch, time_of_sleeper
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import Event, HostState, Stalled, StallKind
from eep.observe.event_log import read_events
from tests.control import ranks
from tests.control.harness import patient_policy, record, runs_with, supervised, until
from tests.membership.membership_host import Host

DEADLINE = 0.5
ALL = (0, 1, 2, 3)
RunWord = tuple[int, int] | None


class WatchedHost:
    def __init__(self) -> None:
        self.state: HostState = Host(stall_deadline=60.0, hung_deadline=DEADLINE).run().state
        self.told: list[Event] = []

    def feed(self, event: Event) -> None:
        self.told.append(event)


def watch(
    seconds: float, word: Callable[[float], RunWord], ran: Callable[[float], int | None], late: float = 0.0
) -> list[Event]:
    """What a host is told after so long of rank 2, whose word and run time are these; the others get on."""
    host, now = WatchedHost(), 0.0
    looks = HangWatch(
        host,
        lambda rank: word(now) if rank == 2 else (int(now * 1e6) + 6, 7),
        lambda rank: 100 + rank,
        lambda pid, thread: ran(now) if (pid, thread) == (102, 7) else 5,
    )
    while now <= seconds and not host.told:
        looks.look(now)
        now += PAUSE + late
    return host.told


def test_a_rank_that_sleeps_without_a_reason_is_told_once_its_time_is_over() -> None:
    assert watch(DEADLINE, lambda now: (6, 7), lambda now: 5) == [], "the first look only learns the word"
    (told,) = watch(2.0, lambda now: (6, 7), lambda now: 5)
    assert isinstance(told, Stalled)
    assert (told.rank, told.kind) == (2, StallKind.HANGS)
    assert told.seconds < 1.0


@pytest.mark.parametrize(
    ("word", "ran"),
    [
        (lambda now: (6, 7), lambda now: int(now * 1e9)),
        (lambda now: (6, 7), lambda now: None),
        (lambda now: (6, 7), lambda now: None if round(now / PAUSE) % 4 == 0 else 5),
        (lambda now: (int(now * 2) * 4 + 6, 7), lambda now: 5),
        (lambda now: None, lambda now: 5),
    ],
    ids=["runs now and then", "is awake", "is awake at some looks", "gets on", "may wait"],
)
def test_a_rank_is_not_told_that(word: Callable[[float], RunWord], ran: Callable[[float], int | None]) -> None:
    assert watch(60.0, word, ran) == []


def test_a_supervisor_that_was_stopped_itself_has_not_seen_a_rank_sleep_for_so_long() -> None:
    assert watch(21.0, lambda now: (6, 7), lambda now: 5, late=10.0) == []


def test_ranks_that_are_not_in_a_view_that_runs_are_left_alone() -> None:
    host = WatchedHost()
    host.state = replace(host.state, revoked=host.state.epoch)
    looks = HangWatch(host, lambda rank: (6, 7), lambda rank: 100, lambda pid, thread: 5)
    for number in range(100):
        looks.look(number * PAUSE)
    assert host.told == []


def test_a_rank_that_gets_on_costs_no_question_to_the_kernel() -> None:
    asked: list[int] = []
    host, words = WatchedHost(), iter(range(4, 10**6, 4))
    looks = HangWatch(host, lambda rank: (next(words) | 2, 7), lambda rank: 100, lambda pid, thread: asked.append(pid))
    for number in range(10):
        looks.look(number * PAUSE)
    assert asked == []


def test_the_kernel_says_who_sleeps() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        # A thread is said to sleep a moment before it leaves its processor.
        ran, before = time_of_sleeper(process.pid, process.pid), None
        while ran is None or ran != before:
            assert process.poll() is None
            ran, before = time_of_sleeper(process.pid, process.pid), ran
        assert ran > 0
        assert time_of_sleeper(process.pid, process.pid) == ran
        assert time_of_sleeper(process.pid, 1) is None, "no thread of that process"
        process.kill()
    assert time_of_sleeper(process.pid, process.pid) is None
    assert time_of_sleeper(os.getpid(), threading.get_native_id()) is None, "this thread is awake"


def run_hung(how: str, monkeypatch: pytest.MonkeyPatch, outcome: Callable[[Supervisor], Awaitable[None]]) -> None:
    monkeypatch.setenv("EEP_TEST_HANG", how)

    async def body() -> None:
        async with supervised(ranks.hangs, policy=patient_policy(4, hung_deadline=DEADLINE)) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            await outcome(supervisor)

    asyncio.run(body())


@pytest.mark.parametrize("how", ["sleeps", "locks itself out"])
def test_a_rank_that_hangs_is_fenced_and_comes_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def outcome(supervisor: Supervisor) -> None:
        await until(supervisor, lambda: record(supervisor).view.incarnations[1] > 0)
        causes = [(line.rank, line.cause) for line in read_events(supervisor.directory.events)]
        assert any(rank == 1 and cause.endswith("it hangs") for rank, cause in causes)

    run_hung(how, monkeypatch, outcome)


@pytest.mark.parametrize(
    "how",
    [
        "computes",
        "waits for a thread that computes",
        "waits for a program",
        "waits for a thread that waits for a program",
        "writes to nobody",
        "may wait",
    ],
)
def test_a_rank_that_may_get_on_is_left_to_the_other_deadlines(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def outcome(supervisor: Supervisor) -> None:
        await asyncio.sleep(4 * DEADLINE)
        assert record(supervisor).view.incarnations == (0, 0, 0, 0)

    run_hung(how, monkeypatch, outcome)
