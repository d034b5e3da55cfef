"""The pulse: felt by another process, stopped by death and by nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from eep.control.pulse import PULSE_BYTES, PulseWatch, is_supported
from eep.memory.shm import SharedMemory
from tests.control.harness import PATIENCE, ROOT

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


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit"])
def test_the_pulse_stops_when_the_process_dies(how: str) -> None:
    process, descriptor = start()
    stopped = threading.Event()
    PulseWatch(descriptor, stopped.set)
    os.kill(process.pid, signal.SIGSTOP)  # stopped is not dead
    os.kill(process.pid, signal.SIGCONT)
    assert not stopped.is_set()
    assert process.stdin is not None
    if how == "exit":
        process.stdin.close()
    else:
        process.send_signal(signal.Signals[how])
    assert stopped.wait(PATIENCE)
    process.wait(PATIENCE)


def test_a_watch_that_begins_after_the_death_sees_it() -> None:
    process, descriptor = start()
    process.kill()
    process.wait(PATIENCE)
    stopped = threading.Event()
    PulseWatch(descriptor, stopped.set)
    assert stopped.wait(PATIENCE)


def test_what_is_no_pulse_is_refused_or_ignored() -> None:
    short = os.memfd_create("short")
    with pytest.raises(ValueError, match="page"):
        PulseWatch(short, lambda: None)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PULSE_BYTES)
    with pytest.raises(ValueError, match="not sealed"):
        PulseWatch(unsealed, lambda: None)
    blank = SharedMemory.create("blank", PULSE_BYTES).fd
    stopped = threading.Event()
    PulseWatch(blank, stopped.set)
    assert not stopped.wait(0.2), "a page that nobody ever locked was taken for a death"
