"""Outlives its supervisor by a moment, to end what it started and remove its directory.

A supervisor that is killed cannot clean up. This process waits on a pipe whose other end only the supervisor
holds. Over the pipe the supervisor tells it the ranks: ``+PID`` for one that was started, ``-PID`` for one that has ended.
When the pipe closes, the keeper kills the ranks and every process of their sessions. It also kills every process that
carries the supervisor's directory in its environment: spares, and what ranks have started. It then removes the directory, if
the supervisor had made it. A process that changes its title may write over its environment; a rank is found all the same.
Meanwhile it holds memory for ranks, which outlives them so (:mod:`eep.anchor`).

Run as ``python -S keeper.py DIRECTORY SESSION [remove] [NAME=VALUE...]``. The keeper imports nothing of EEP, so
that it is small and starts fast. Forked ranks have the environment with which their first ancestor was started,
so another variable may have to identify them. The supervisor has that variable too: its session is spared.

The keeper leaves its parent at once, so that it survives when the supervisor and all its descendants are killed.
It says its number then. Its standard output closes when it is done.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import Any

GIVES_UP_AFTER = 30.0


def belongs(pid: int, mark: bytes, session: int, others: set[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = set(file.read().split(b"\0"))
        return mark in found or (not others.isdisjoint(found) and os.getsid(pid) != session)
    except OSError:
        return False  # it is gone, or belongs to another user


class ToldRanks:
    """The ranks that the supervisor has told of, by pidfds: another process may get the number of one that has ended."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}

    def hear(self, line: bytes) -> None:
        pid = int(line[1:])
        if (known := self._pidfds.pop(pid, None)) is not None:
            os.close(known)
        if line[:1] == b"+":
            with suppress(OSError):  # it has ended already
                self._pidfds[pid] = os.pidfd_open(pid)

    def kill(self) -> None:
        for pidfd in self._pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def include(self, pid: int) -> bool:
        """Whether a process is one of them or belongs to the session of one, and is not dead already."""
        try:
            if os.getsid(pid) not in self._pidfds:
                return False
            with open(f"/proc/{pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
        except OSError:
            return False


def listen(told: ToldRanks, holder: Any) -> None:
    """Until the pipe closes. Memory is held meanwhile, if there is a holder."""
    heard = b""
    while (holder is None or holder.wait(0)) and (piece := os.read(0, 4096)):
        *lines, heard = (heard + piece).split(b"\n")
        for line in lines:
            told.hear(line)


def memory_holder(directory: str) -> Any:
    """:mod:`eep.anchor.memory_holder`, without the package. None where the disk is full: the rest is done all the same."""
    path = os.path.join(os.path.dirname(__file__), "..", "..", "anchor", "memory_holder.py")
    spec = importlib.util.spec_from_file_location("memory_holder", path)
    try:
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.MemoryHolder(os.path.join(directory, "anchor.sock"))
    except OSError:
        return None


def end_all(told: ToldRanks, mark: bytes, session: int, others: set[bytes]) -> None:
    """Kill until nothing is left to kill: a process may have been forking when it was first looked for."""
    deadline = time.monotonic() + GIVES_UP_AFTER
    while time.monotonic() < deadline:
        told.kill()
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        pids.remove(os.getpid())
        left = [pid for pid in pids if told.include(pid) or belongs(pid, mark, session, others)]
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def sweep(directory: str) -> None:
    """Remove the files in shared memory that the directory's file ``sweep`` names, one pattern to a line: those that the
    processes would have removed, had they not been killed."""
    try:
        with open(os.path.join(directory, "sweep")) as file:
            patterns = file.read().split()
    except OSError:
        return
    for pattern in patterns:
        for path in glob.glob(pattern):
            if os.path.dirname(path) == "/dev/shm":
                with suppress(OSError):
                    os.unlink(path)


def main(directory: str, session: int, remove: bool, others: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the pipe does, never before
    holder = memory_holder(directory)
    if child := os.fork():
        os.write(1, b"%d\n" % child)
        os._exit(0)
    told = ToldRanks()
    listen(told, holder)
    end_all(told, b"EEP_CONTROL_DIR=" + os.fsencode(directory), session, {os.fsencode(other) for other in others})
    sweep(directory)
    if remove:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "remove" in sys.argv[3:], [each for each in sys.argv[3:] if "=" in each])
