"""The supervisor's looks at whether the processes of its ranks are stopped: by SIGSTOP, or by a terminal.

A stopped process is no slow one: the kernel says that it will not run until it is told to. So a rank that is in and stays
stopped is told to the core in well under a second, where its peers would wait for a whole deadline. One that runs between two
looks, if only for a moment, is not stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from eep.control.supervisor.stall_watch import StalledHost
from eep.membership import Stalled, Standstill, after_look, has_stalled

PAUSE = 0.15
"""Seconds between two looks."""
_STOPPED = "T"


def time_of_stopped(pid: int, proc: Path = Path("/proc")) -> int | None:
    """For how many nanoseconds the main thread of a process has ever run, if the process is stopped; None if it is not."""
    try:
        state = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split(maxsplit=1)[0].decode()
        if state != _STOPPED:
            return None
        return int((proc / str(pid) / "schedstat").read_bytes().split()[0])
    except (OSError, ValueError, IndexError):
        return None


class StoppedWatch:
    """``pids``: the process of each rank. ``run_time`` of a process, if it is stopped; None if not."""

    def __init__(
        self,
        host: StalledHost,
        pids: Callable[[], Mapping[int, int]],
        run_time: Callable[[int], int | None] = time_of_stopped,
    ) -> None:
        self._host, self._pids, self._run_time = host, pids, run_time
        self._deadline = host.state.policy.stopped_deadline
        self._seen: dict[int, Standstill] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look now and then, in the running event loop. Does nothing without a deadline."""
        if self._deadline > 0:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._tick)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def look(self, now: float) -> None:
        state, seen = self._host.state, {}
        for rank, pid in self._pids().items():
            if not state.is_in(rank):
                continue
            ran = self._run_time(pid)
            if ran is not None:
                # A look that is late counts for no more than one that is in time: see Standstill.
                life = state.ranks[rank].incarnation
                seen[rank] = after_look(self._seen.get(rank), life, ran, now, 1.5 * PAUSE)
        self._seen = seen
        for rank, each in seen.items():
            if has_stalled(each, self._deadline):
                self._host.feed(Stalled(rank, each.incarnation, each.seconds, stopped=True))

    def _tick(self) -> None:
        self.start()
        self.look(time.monotonic())
