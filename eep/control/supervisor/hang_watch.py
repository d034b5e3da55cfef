"""The supervisor's looks at whether a rank hangs: it sleeps where it has no reason to, and nothing that it could wait for
gets on.

A rank that computes for long is not told from one that computes for ever, and is left to the other deadlines. But one whose
thread sleeps is no slow one. It hangs if all of this holds, look after look:

- its progress word has not changed, and says that it waits for no peer and no device;
- the kernel has not run its thread, not for a moment. A thread that waits for a processor is not asleep, however long it
  waits: so a busy machine makes no rank hang;
- the thread sleeps on a lock or a timer. One that sleeps in a read or a write waits for another program;
- no other thread of the process runs, waits for a processor or for a disk: else it may wait for that one;
- the process has no child, such as a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from eep.control.supervisor.rank_watch import StalledHost
from eep.control.supervisor.run_watch import PAUSE, RunWatch, RunWord
from eep.membership import Event, Stalled, StallKind, Standstill, after_look

_ASLEEP, _AT_WORK = "S", ("R", "D")
_LOCK_OR_TIMER = ("futex", "hrtimer_nanosleep", "do_nanosleep")


def time_of_sleeper(pid: int, thread: int, proc: Path = Path("/proc")) -> int | None:
    """For how many nanoseconds a thread has ever run, if it sleeps on a lock or a timer and nothing of its process gets on;
    None otherwise, and where the kernel does not say."""
    tasks = proc / str(pid) / "task"
    own = tasks / str(thread)
    try:
        if _state(own) != _ASLEEP or not (own / "wchan").read_text().startswith(_LOCK_OR_TIMER):
            return None
        for task in tasks.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while we look
                if _state(task) in _AT_WORK or (task / "children").read_bytes().strip():
                    return None
        (own / "children").read_bytes()  # a kernel that does not list children cannot say that there are none
        return int((own / "schedstat").read_bytes().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _state(task: Path) -> str:
    return (task / "stat").read_bytes().rpartition(b")")[2].split(maxsplit=1)[0].decode()


class HangWatch(RunWatch):
    """``run_word`` of a rank: see :meth:`ProgressWord.read_run`. ``run_time`` of a thread that sleeps."""

    def __init__(
        self,
        host: StalledHost,
        run_word: RunWord,
        pid_of: Callable[[int], int | None],
        run_time: Callable[[int, int], int | None] = time_of_sleeper,
    ) -> None:
        super().__init__(host, run_word, pid_of)
        self._run_time = run_time

    def _see(self, now: float) -> Mapping[int, Standstill]:
        seen = {}
        for still in self._still_ranks():
            ran = self._run_time(still.pid, still.thread)
            if ran is not None:
                # A look that is late counts for no more than one that is in time: see Standstill.
                mark, before = still.word << 64 | ran, self._seen.get(still.rank)
                seen[still.rank] = after_look(before, still.incarnation, mark, now, 1.5 * PAUSE)
        return seen

    def _event(self, rank: int, seen: Standstill) -> Event:
        return Stalled(rank, seen.incarnation, seen.seconds, StallKind.HANGS)
