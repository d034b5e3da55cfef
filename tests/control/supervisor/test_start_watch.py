"""A rank that hangs while it starts is replaced, long before the deadline of its start; one that does anything is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from eep.control.supervisor import start_watch
from eep.control.supervisor.rank_watches import RankWatches
from eep.control.supervisor.start_watch import PAUSE, StartWatch, time_of_idle
from eep.membership import Event, HostState, Stalled, StallKind
from eep.observe.event_log import read_events
from tests.control import ranks
from tests.control.harness import PATIENCE, patient_policy, runs_with, supervised, until
from tests.membership.membership_host import Host

DEADLINE = 5.0


class StartingHost:
    def __init__(self, state: HostState) -> None:
        self.state, self.told = state, list[Event]()

    def feed(self, event: Event) -> None:
        self.told.append(event)


def watch(state: HostState, seconds: float, mark: Callable[[float], int | None], late: float = 0.0) -> list[Event]:
    """What a host is told after so long of rank 2, of whose process the kernel says this."""
    host, now = StartingHost(state), 0.0
    looks = StartWatch(host, lambda: {2: 102}, lambda pid: mark(now))
    while now <= seconds and not host.told:
        looks.look(now)
        now += PAUSE + late
    return host.told


def starting() -> HostState:
    return Host(stall_deadline=DEADLINE).state


def test_a_rank_of_which_nothing_gets_on_is_told_once_its_time_is_over() -> None:
    assert watch(starting(), DEADLINE - PAUSE, lambda now: 7) == []
    (told,) = watch(starting(), 2 * DEADLINE, lambda now: 7)
    assert isinstance(told, Stalled)
    assert (told.rank, told.kind) == (2, StallKind.HANGS)


@pytest.mark.parametrize(
    "mark",
    [lambda now: int(now), lambda now: None, lambda now: None if round(now) % 3 == 0 else 7],
    ids=["runs now and then", "is awake", "is awake at some looks"],
)
def test_a_rank_is_not_told_that(mark: Callable[[float], int | None]) -> None:
    assert watch(starting(), 20 * DEADLINE, mark) == []


def test_a_supervisor_that_was_stopped_itself_has_not_seen_a_rank_hang_for_so_long() -> None:
    assert watch(starting(), 21.0, lambda now: 7, late=10.0) == []


def test_a_rank_that_has_started_may_wait_to_be_let_in() -> None:
    assert watch(Host(stall_deadline=DEADLINE).run().state, 20 * DEADLINE, lambda now: 7) == []


class NoWords:
    """Of ranks that have not said anything yet."""

    def progress_of(self, rank: int) -> int | None:
        return None

    def run_word_of(self, rank: int) -> tuple[int, int] | None:
        return None


def test_the_status_says_for_how_long_a_rank_that_starts_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    mark: list[int | None] = [7]
    monkeypatch.setattr(start_watch.StartWatch.__init__, "__defaults__", (lambda pid: mark[0],))
    watches = RankWatches(StartingHost(starting()), NoWords(), lambda: {2: 102})
    for now in (0.0, PAUSE, 2 * PAUSE):
        watches._starts.look(now)
    assert watches.still_for(2) == 2 * PAUSE
    assert watches.still_for(1) is None
    mark[0] = None
    watches._starts.look(3 * PAUSE)
    assert watches.still_for(2) is None


PROGRAMS = {
    "sleeps": "import time; ready(); time.sleep(3600)",
    "waits for a lock": "import threading; lock = threading.Lock(); lock.acquire(); ready(); lock.acquire()",
    "waits for a thread that looks at the clock": (
        "import threading, time; ready()\n"
        "def look():\n while True: time.sleep(3)\n"
        "threading.Thread(target=look, daemon=True).start(); threading.Event().wait()"
    ),
    "polls": "import time; ready()\nwhile True: time.sleep(0.05)",
    "reads": "import os; pipe = os.pipe(); ready(); os.read(pipe[0], 1)",
    "computes": "ready()\nwhile True: pass",
    "waits for a thread that is busy now and then": (
        "import threading, time; ready()\n"
        "def bring():\n while True:\n  time.sleep(0.02); sum(range(20000))\n"
        "threading.Thread(target=bring, daemon=True).start(); threading.Event().wait()"
    ),
    "waits for a program": (
        "import subprocess, threading; subprocess.Popen(['sleep', '3600'], stdout=2); ready(); threading.Event().wait()"
    ),
}


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    beginning = "def ready(): print(flush=True)\n"
    command = [sys.executable, "-c", beginning + PROGRAMS[request.param]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None
        started.stdout.readline()
        try:
            yield started
        finally:
            os.killpg(started.pid, 9)


@pytest.mark.parametrize(
    "process", ["sleeps", "waits for a lock", "waits for a thread that looks at the clock"], indirect=True
)
def test_the_kernel_says_that_nothing_gets_on(process: subprocess.Popen[bytes]) -> None:
    marks: list[int | None] = []
    pause = threading.Event()
    while len(marks) < 5 or marks[-5:] != [marks[-1]] * 5 or marks[-1] is None:
        marks.append(time_of_idle(process.pid))
        assert len(marks) < PATIENCE / 0.1, f"it is never idle: {marks[-20:]}"
        pause.wait(0.1)


@pytest.mark.parametrize(
    "process",
    ["polls", "reads", "computes", "waits for a thread that is busy now and then", "waits for a program"],
    indirect=True,
)
def test_the_kernel_does_not_say_that_of_a_process_that(process: subprocess.Popen[bytes]) -> None:
    marks, pause = list[int | None](), threading.Event()
    # At least some looks, and until one of them shows that the process gets on, however busy the machine is.
    while len(marks) < 30 or (None not in marks and len(set(marks)) == 1):
        marks.append(time_of_idle(process.pid))
        assert len(marks) < PATIENCE / 0.1, f"it was taken for idle: {set(marks)}"
        pause.wait(0.1)


def test_a_process_that_has_ended_is_not_idle() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert time_of_idle(process.pid) is None


def test_a_rank_that_hangs_while_it_starts_is_fenced_and_comes_back() -> None:
    async def body() -> None:
        policy = patient_policy(2, stall_deadline=DEADLINE)
        async with supervised(ranks.locks_itself_out_as_it_starts, 2, policy=policy) as supervisor:
            await until(supervisor, runs_with(supervisor, (0, 1)))
            causes = [line.cause for line in read_events(supervisor.directory.events) if line.rank == 1]
            assert any(cause.endswith("it hangs") for cause in causes)

    asyncio.run(body())
