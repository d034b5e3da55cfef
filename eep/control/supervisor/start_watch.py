"""The supervisor's looks at whether a rank that starts hangs: nothing of its process gets on, and it waits for no other.

A rank that starts has no progress word yet. It imports, loads, compiles and captures, for minutes if need be, and no look
from outside tells slow work from work without an end. But a process that does nothing at all is no slow one. It hangs if all
of this holds, look after look:

- its main thread sleeps on a lock or a timer, and the kernel has not run it for a nanosecond. One that polls is run;
- no thread of the process runs, waits for a processor or for a disk;
- the other threads together have run for less than :data:`_IDLE_NS`. One that brings weights in takes more; one that only
  looks at the clock every few seconds takes less;
- the process has no child, such as a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from eep.control.supervisor.hang_watch import time_of_sleeper
from eep.control.supervisor.rank_watch import RankWatch, StalledHost
from eep.membership import Event, RankStatus, Stalled, StallKind, Standstill, after_look

PAUSE = 1.0
"""Seconds between two looks."""
_IDLE_NS = 1 << 21
"""Two milliseconds."""


def time_of_idle(pid: int, proc: Path = Path("/proc")) -> int | None:
    """A number that stays the same while nothing of a process gets on; None while something does, or may."""
    own = time_of_sleeper(pid, pid, proc)
    if own is None:
        return None
    ran = 0
    try:
        for task in (proc / str(pid) / "task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while we look
                ran += int((task / "schedstat").read_bytes().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return own << 64 | (ran - own) // _IDLE_NS


class StartWatch(RankWatch):
    """``pids``: the process of each rank. ``idle_mark`` of a process: see :func:`time_of_idle`."""

    def __init__(
        self,
        host: StalledHost,
        pids: Callable[[], Mapping[int, int]],
        idle_mark: Callable[[int], int | None] = time_of_idle,
    ) -> None:
        super().__init__(host, host.state.policy.stall_deadline, PAUSE)
        self._pids, self._idle_mark = pids, idle_mark

    def _see(self, now: float) -> Mapping[int, Standstill]:
        state, seen = self._host.state, {}
        for rank, pid in self._pids().items():
            if state.ranks[rank].status is not RankStatus.STARTING:
                continue
            mark = self._idle_mark(pid)
            if mark is not None:
                # Twice the pause: a busy machine may be late with a look, and it still counts.
                life = state.ranks[rank].incarnation
                seen[rank] = after_look(self._seen.get(rank), life, mark, now, 2 * PAUSE)
        return seen

    def _event(self, rank: int, seen: Standstill) -> Event:
        return Stalled(rank, seen.incarnation, seen.seconds, StallKind.HANGS)
