"""The supervisor's looks at whether a rank spins: its thread computes, for longer than anything honest would, and nothing
comes of it.

From outside a long computation and one without end look alike, so this watch knows few of the latter. A rank spins if all of
this holds, look after look:

- its progress word has not changed. It says that the rank waits for no peer and no device, and that it has no reason to
  compute for long: no rank prefills in this step or the one before;
- where its device may make it wait unseen, so that it spins until its kernels are done, it is the only rank of the view
  that runs and does not get on: its kernels may wait for those of a rank that hangs. Of ranks on other hosts this watch
  sees nothing, so there it judges none;
- its thread hardly sleeps: it runs, or waits for a processor;
- it touches no memory that it had not touched before, as a list does that grows;
- it works alone: other threads of the process hardly run, and the process has no child.

What counts is the time for which the kernel has run the thread. On a busy machine a rank that is slow gets less of it, and so
has longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eep.control.progress_word import may_take_long, may_wait_unseen
from eep.control.supervisor.rank_watch import StalledHost
from eep.control.supervisor.run_watch import PAUSE, RunWatch, RunWord
from eep.membership import Event, Stalled, StallKind, Standstill, after_look

_AWAKE_SHARE, _OTHERS_SHARE = 0.8, 0.1
_MINOR_FAULTS, _MAJOR_FAULTS = 7, 9
"""In /proc/PID/stat, of the fields behind the name."""


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """What the kernel says of a thread and of the others of its process. Times are in seconds."""

    ran: float
    waited: float
    """For a processor."""
    others_ran: float
    faults: int
    """How often it has touched memory that was not there yet."""


def times_of_thread(pid: int, thread: int, proc: Path = Path("/proc")) -> ThreadTimes | None:
    """None if the process has a child, and where the kernel does not say."""
    tasks = proc / str(pid) / "task"
    own, others = tasks / str(thread), 0.0
    try:
        ran, waited = _run_times(own)
        for task in tasks.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while we look
                if (task / "children").read_bytes().strip():
                    return None
                others += _run_times(task)[0] if task != own else 0.0
        (own / "children").read_bytes()  # a kernel that does not list children cannot say that there are none
        fields = (own / "stat").read_bytes().rpartition(b")")[2].split()
        return ThreadTimes(ran, waited, others, int(fields[_MINOR_FAULTS]) + int(fields[_MAJOR_FAULTS]))
    except (OSError, ValueError, IndexError):
        return None


def _run_times(task: Path) -> tuple[float, float]:
    ran, waited = (task / "schedstat").read_bytes().split()[:2]
    return int(ran) / 1e9, int(waited) / 1e9


@dataclass(frozen=True, slots=True)
class _Look:
    """What a look at a rank has shown that may spin."""

    at: float
    times: ThreadTimes

    def is_followed_by(self, now: float, times: ThreadTimes) -> bool:
        """Whether the thread has done nothing since but compute."""
        before, ran = self.times, times.ran - self.times.ran
        awake = ran + times.waited - before.waited
        return (
            times.faults == before.faults
            and awake >= _AWAKE_SHARE * (now - self.at)
            and 0.0 <= times.others_ran - before.others_ran <= _OTHERS_SHARE * ran
        )


class SpinWatch(RunWatch):
    """``run_word`` of a rank: see :meth:`ProgressWord.read_run`. ``times`` of a thread."""

    def __init__(
        self,
        host: StalledHost,
        run_word: RunWord,
        pid_of: Callable[[int], int | None],
        times: Callable[[int, int], ThreadTimes | None] = times_of_thread,
    ) -> None:
        super().__init__(host, run_word, pid_of)
        self._times = times
        self._looks: dict[int, _Look] = {}

    def _see(self, now: float) -> Mapping[int, Standstill]:
        looks, seen, all_still = {}, {}, list(self._still_ranks())
        may_wait_for_others = len(all_still) > 1 or not self._sees_the_view()
        for still in all_still:
            if may_take_long(still.word) or (may_wait_unseen(still.word) and may_wait_for_others):
                continue
            rank, times = still.rank, self._times(still.pid, still.thread)
            if times is None:
                continue
            look = self._looks.get(rank)
            before = self._seen.get(rank) if look is not None and look.is_followed_by(now, times) else None
            looks[rank] = _Look(now, times)
            # The clock is the thread's own. A look that is late counts for no more than one that is in time: see Standstill.
            seen[rank] = after_look(before, still.incarnation, still.word, times.ran, 1.5 * PAUSE)
        self._looks = looks
        return seen

    def _sees_the_view(self) -> bool:
        """Whether all its ranks are on this host."""
        state = self._host.state
        return state.instance is not None and all(rank in state.ranks for rank in state.instance.view.active)

    def _event(self, rank: int, seen: Standstill) -> Event:
        return Stalled(rank, seen.incarnation, seen.seconds, StallKind.SPINS)
