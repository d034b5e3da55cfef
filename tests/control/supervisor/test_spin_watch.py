"""A rank that computes without end is out in about a second of its processor's time; one that may have a reason is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from eep.control.supervisor.spin_watch import PAUSE, SpinWatch, ThreadTimes, times_of_thread
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import Event, HostState, Stalled, StallKind
from eep.observe.event_log import read_events
from tests.control import ranks
from tests.control.harness import patient_policy, record, runs_with, supervised, until
from tests.membership.membership_host import Host

DEADLINE = 0.5
ALL = (0, 1, 2, 3)
LONG, UNSEEN = 4, 8
RunWord = tuple[int, int] | None


class WatchedHost:
    def __init__(self) -> None:
        self.state: HostState = Host(stall_deadline=60.0, hung_deadline=DEADLINE).run().state
        self.told: list[Event] = []

    def feed(self, event: Event) -> None:
        self.told.append(event)


def word(count: int, *says: int) -> int:
    """That of a rank that runs."""
    return 16 * count | 2 | sum(says)


def same(now: float) -> RunWord:
    return (word(1), 7)


def spins(now: float) -> ThreadTimes:
    return ThreadTimes(ran=now, waited=0.0, others_ran=0.01 * now, faults=9)


def gets_on(now: float) -> RunWord:
    return (word(1 + int(now * 1e6)), 7)


def watch(
    seconds: float,
    says: Callable[[float], RunWord],
    times: Callable[[float], ThreadTimes | None],
    late: float = 0.0,
    others: Callable[[float], RunWord] = gets_on,
) -> list[tuple[float, Event]]:
    """When a host is told what, within so long, of rank 2, whose word and times are these; the others get on, by default."""
    host, now = WatchedHost(), 0.0
    looks = SpinWatch(
        host,
        lambda rank: says(now) if rank == 2 else others(now),
        lambda rank: 100 + rank,
        lambda pid, thread: times(now) if (pid, thread) == (102, 7) else spins(now),
    )
    while now <= seconds and not host.told:
        looks.look(now)
        now += PAUSE + late
    return [(now, event) for event in host.told]


def test_a_rank_that_spins_is_told_once_its_time_is_over() -> None:
    assert watch(DEADLINE, same, spins) == [], "the first look only learns the word"
    ((when, told),) = watch(2.0, same, spins)
    assert isinstance(told, Stalled)
    assert (told.rank, told.kind) == (2, StallKind.SPINS)
    assert DEADLINE < when < 1.0


@pytest.mark.parametrize(
    ("says", "times"),
    [
        (lambda now: (word(1 + int(now * 2)), 7), spins),
        (lambda now: None, spins),
        (lambda now: (word(1, LONG), 7), spins),
        (same, lambda now: None),
        (same, lambda now: replace(spins(now), ran=0.7 * now)),
        (same, lambda now: replace(spins(now), faults=int(4 * now))),
        (same, lambda now: replace(spins(now), others_ran=0.5 * now)),
        (same, lambda now: replace(spins(now), others_ran=-now)),
    ],
    ids=[
        "gets on",
        "may wait",
        "may take long",
        "has a child",
        "sleeps",
        "touches memory",
        "is not alone",
        "a thread ends",
    ],
)
def test_a_rank_is_not_told_that(
    says: Callable[[float], RunWord], times: Callable[[float], ThreadTimes | None]
) -> None:
    assert watch(60.0, says, times) == []


def test_a_rank_that_may_wait_unseen_is_told_if_all_others_get_on_or_wait() -> None:
    for others in (gets_on, lambda now: None):
        ((_, told),) = watch(2.0, lambda now: (word(1, UNSEEN), 7), spins, others=others)
        assert isinstance(told, Stalled)
        assert (told.rank, told.kind) == (2, StallKind.SPINS)


def test_a_rank_that_may_wait_unseen_is_not_told_while_another_does_not_get_on() -> None:
    """That one may be what its kernels wait for."""
    assert watch(60.0, lambda now: (word(1, UNSEEN), 7), spins, others=lambda now: (word(1, LONG), 7)) == []


@pytest.mark.parametrize(("says", "is_told"), [(UNSEEN, False), (0, True)], ids=["may wait unseen", "runs"])
def test_where_ranks_of_other_hosts_are_in_the_view_a_rank_that_may_wait_unseen_is_not_told(
    says: int, is_told: bool
) -> None:
    """Its kernels may wait for one of those, of which nothing is seen here."""
    host, now = WatchedHost(), 0.0
    host.state = replace(host.state, ranks={2: host.state.ranks[2]})
    looks = SpinWatch(host, lambda rank: (word(1, says), 7), lambda rank: 102, lambda pid, thread: spins(now))
    for number in range(20):
        now = number * PAUSE
        looks.look(now)
    assert bool(host.told) == is_told


def test_time_for_which_a_rank_waits_for_a_processor_does_not_count() -> None:
    ((when, told),) = watch(60.0, same, lambda now: ThreadTimes(now / 10, 0.9 * now, 0.0, 9))
    assert when > 10 * DEADLINE
    assert isinstance(told, Stalled)
    assert told.seconds < 2 * DEADLINE


def test_a_supervisor_that_was_stopped_itself_has_not_seen_a_rank_spin_for_so_long() -> None:
    assert watch(21.0, same, spins, late=10.0) == []


def test_ranks_that_are_not_in_a_view_that_runs_are_left_alone() -> None:
    host, now = WatchedHost(), 0.0
    host.state = replace(host.state, revoked=host.state.epoch)
    looks = SpinWatch(host, lambda rank: (word(1), 7), lambda rank: 100, lambda pid, thread: spins(now))
    for number in range(100):
        now = number * PAUSE
        looks.look(now)
    assert host.told == []


def test_a_rank_that_gets_on_costs_no_question_to_the_kernel() -> None:
    asked: list[int] = []
    host, counts = WatchedHost(), iter(range(10**6))
    looks = SpinWatch(
        host, lambda rank: (word(next(counts)), 7), lambda rank: 100, lambda pid, thread: asked.append(pid)
    )
    for number in range(10):
        looks.look(number * PAUSE)
    assert asked == []


def test_the_kernel_says_for_how_long_a_thread_has_run() -> None:
    program = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True)\n"
    program += "while True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = times_of_thread(process.pid, process.pid)
        assert first is not None
        end = time.monotonic() + 60
        while (times := times_of_thread(process.pid, process.pid)) is not None and times.ran < first.ran + 0.3:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert times is not None
        assert times.others_ran - first.others_ran < 0.1
        assert times_of_thread(process.pid, 1) is None, "no thread of that process"
        assert times_of_thread(os.getpid(), threading.get_native_id()) is None, "this process has a child"
        process.kill()
    assert times_of_thread(process.pid, process.pid) is None


def run_hung(how: str, monkeypatch: pytest.MonkeyPatch, outcome: Callable[[Supervisor], Awaitable[None]]) -> None:
    monkeypatch.setenv("EEP_TEST_HANG", how)

    async def body() -> None:
        async with supervised(ranks.hangs, policy=patient_policy(4, hung_deadline=DEADLINE)) as supervisor:
            await until(supervisor, runs_with(supervisor, ALL))
            await outcome(supervisor)

    asyncio.run(body())


def test_a_rank_that_spins_is_fenced_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def outcome(supervisor: Supervisor) -> None:
        await until(supervisor, lambda: record(supervisor).view.incarnations[1] > 0)
        causes = [(line.rank, line.cause) for line in read_events(supervisor.directory.events)]
        assert any(rank == 1 and cause.endswith("it computes without end") for rank, cause in causes)

    run_hung("spins", monkeypatch, outcome)
