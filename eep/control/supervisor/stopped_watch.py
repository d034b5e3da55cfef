"""The supervisor's looks at whether the processes of its ranks are stopped: by SIGSTOP, or by a terminal.

A stopped process is no slow one: the kernel says that it will not run until it is told to. So a rank that stays stopped is
told to the core in well under a second, whatever it was doing: it may serve, repair, or start. Its peers would wait for a
whole deadline. One that runs between two looks, if only for a moment, is not stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from eep.control.supervisor.rank_watch import RankWatch, StalledHost
from eep.membership import Event, Stalled, StallKind, Standstill, after_look

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


class StoppedWatch(RankWatch):
    """``pids``: the process of each rank. ``run_time`` of a process, if it is stopped; None if not."""

    def __init__(
        self,
        host: StalledHost,
        pids: Callable[[], Mapping[int, int]],
        run_time: Callable[[int], int | None] = time_of_stopped,
    ) -> None:
        super().__init__(host, host.state.policy.stopped_deadline, PAUSE)
        self._pids, self._run_time = pids, run_time

    def _see(self, now: float) -> Mapping[int, Standstill]:
        state, seen = self._host.state, {}
        for rank, pid in self._pids().items():
            if not state.ranks[rank].runs:
                continue  # it is being ended already
            ran = self._run_time(pid)
            if ran is not None:
                # A look that is late counts for no more than one that is in time: see Standstill.
                life = state.ranks[rank].incarnation
                seen[rank] = after_look(self._seen.get(rank), life, ran, now, 1.5 * PAUSE)
        return seen

    def _event(self, rank: int, seen: Standstill) -> Event:
        return Stalled(rank, seen.incarnation, seen.seconds, StallKind.STOPPED)
