"""Rank processes: started in a session of their own, watched with a pidfd, ended with SIGKILL.

The exit of a process is an event of the kernel: it is known in well under a millisecond, and never by
asking around.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FunctionType

Exit = Callable[[int, int, str, bool], None]
"""Called with rank, incarnation, evidence, and whether the process ended cleanly."""


def command_of(function: FunctionType) -> list[str]:
    """The command that runs a Python function in a fresh interpreter. It is named, not shipped: nothing is pickled."""
    name = f"{function.__module__}:{function.__qualname__}"
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise ValueError(f"{name} cannot be found from another process; move it to the top level of a module")
    return [sys.executable, "-m", "eep.control.entry", name]


class Processes:
    """The processes of one host, one per rank."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], exited: Exit) -> None:
        if not command:
            raise ValueError("give the command of a rank: a program and its arguments")
        self._command = list(command)
        self._environment = dict(environment)
        self._exited = exited
        self._running: dict[int, tuple[int, subprocess.Popen[bytes], int]] = {}

    @property
    def pids(self) -> dict[int, int]:
        """The process id of every rank that runs."""
        return {rank: process.pid for rank, (_, process, _) in self._running.items()}

    def launch(self, rank: int, incarnation: int) -> None:
        environment = {
            **os.environ,
            **self._environment,
            "EEP_RANK": str(rank),
            "EEP_INCARNATION": str(incarnation),
        }
        loop = asyncio.get_running_loop()
        try:
            process = subprocess.Popen(self._command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            loop.call_soon(self._exited, rank, incarnation, f"cannot be started: {error}", False)
            return
        pidfd = os.pidfd_open(process.pid)
        self._running[rank] = (incarnation, process, pidfd)
        loop.add_reader(pidfd, self._reap, rank)

    def fence(self, rank: int, incarnation: int) -> None:
        """SIGKILL to the rank and all it started. The exit is told like any other."""
        running = self._running.get(rank)
        if running is not None and running[0] == incarnation:
            # It has not been waited for, so its number cannot be anybody else's yet.
            with suppress(ProcessLookupError):
                os.killpg(running[1].pid, signal.SIGKILL)

    def _reap(self, rank: int) -> None:
        incarnation, process, pidfd = self._running.pop(rank)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        with suppress(ProcessLookupError):  # what it started goes with it
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        self._exited(rank, incarnation, describe_exit(code), code == 0)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
