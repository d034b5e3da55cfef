"""The pulse: felt by another process, stopped by death and by nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from eep.control.pulse import _OWNER_DIED, PULSE_BYTES, PulseWatch, is_supported
from eep.control.supervisor import front_desk
from eep.data_plane.memory.shm import SharedMemory
from eep.membership import RankStatus
from tests.control import ranks
from tests.control.harness import PATIENCE, ROOT, supervised, until, wait_until_all_threads_stand_still

pytestmark = pytest.mark.skipif(
    not is_supported(), reason="robust futexes are used on Linux with glibc, x86-64 and arm64"
)

PROGRAM = """
import socket, sys, threading
from eep.control.pulse import Pulse
pulse = Pulse()
with socket.socket(fileno=int(sys.argv[1])) as out:
    socket.send_fds(out, [b"x"], [pulse.descriptor])
    sys.stdin.read()
"""


def start() -> tuple[subprocess.Popen[bytes], int]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    return process, descriptor


def feel_the_end(descriptor: int, end: Callable[[], object]) -> None:
    """Watch a pulse, do what ends it, and wait until that was felt."""

    async def body() -> None:
        stopped = asyncio.Event()
        PulseWatch(descriptor, stopped.set)
        end()
        await asyncio.wait_for(stopped.wait(), PATIENCE)

    asyncio.run(body())


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit"])
def test_the_pulse_stops_when_the_process_dies(how: str) -> None:
    process, descriptor = start()
    assert process.stdin is not None
    end = process.stdin.close if how == "exit" else lambda: process.send_signal(signal.Signals[how])
    feel_the_end(descriptor, end)
    process.wait(PATIENCE)


def test_a_watch_that_begins_after_the_death_sees_it() -> None:
    process, descriptor = start()
    process.kill()
    process.wait(PATIENCE)
    feel_the_end(descriptor, lambda: None)


def test_a_stopped_process_is_not_dead() -> None:
    """The kernel marks the word of a dead process only, and the watch acts on that mark alone."""

    async def body() -> None:
        process, descriptor = start()
        stopped = asyncio.Event()
        watch = PulseWatch(descriptor, stopped.set)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until_all_threads_stand_still(process.pid)
        assert not watch._word.value & _OWNER_DIED
        assert watch._thread.is_alive(), "the watch gave up"
        assert not stopped.is_set()
        process.kill()
        await asyncio.wait_for(stopped.wait(), PATIENCE)
        assert watch._word.value & _OWNER_DIED, "the test looks at the wrong word"
        process.wait(PATIENCE)

    asyncio.run(body())


def test_what_is_no_pulse_is_refused_or_ignored() -> None:
    async def body() -> None:
        short = os.memfd_create("short")
        with pytest.raises(ValueError, match="page"):
            PulseWatch(short, lambda: None)
        unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, PULSE_BYTES)
        with pytest.raises(ValueError, match="not sealed"):
            PulseWatch(unsealed, lambda: None)
        blank = SharedMemory.create("blank", PULSE_BYTES).fd
        stopped = asyncio.Event()
        watch = PulseWatch(blank, stopped.set)
        await asyncio.to_thread(watch._thread.join, PATIENCE)
        assert not watch._thread.is_alive(), "the watch waits for a lock that no process holds"
        await asyncio.sleep(0)  # what the thread handed to the loop, if anything, has run by now
        assert not stopped.is_set(), "a page that was never locked was taken for a death"

    asyncio.run(body())


def test_a_pulse_that_is_felt_after_the_exit_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the pidfd may be ahead of the thread that feels the pulse."""
    feels, the_exit_is_known, felt = threading.Event(), threading.Event(), threading.Event()

    class LateWatch(PulseWatch):
        def close(self) -> None:
            assert feels.wait(PATIENCE), "the thread would find the watch closed, and have nothing to tell"
            super().close()

        def _feel(self) -> None:
            in_time = self._loop

            class LateLoop:
                def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
                    feels.set()
                    the_exit_is_known.wait(PATIENCE)
                    in_time.call_soon_threadsafe(callback)
                    felt.set()

            self._loop = LateLoop()  # type: ignore[assignment]
            super()._feel()

    async def body() -> None:
        async with supervised(ranks.finishes, 1) as supervisor:
            await until(supervisor, lambda: supervisor.state.ranks[0].status is RankStatus.DOWN)
            the_exit_is_known.set()
            assert await asyncio.to_thread(felt.wait, PATIENCE)
            assert supervisor.journal.rejected == {}

    monkeypatch.setattr(front_desk, "PulseWatch", LateWatch)
    asyncio.run(body())
