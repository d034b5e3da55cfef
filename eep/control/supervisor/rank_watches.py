"""All looks of a supervisor at whether its ranks get on: they stand still, are stopped, hang or spin, also
while they start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from eep.control.supervisor.hang_watch import HangWatch
from eep.control.supervisor.rank_watch import StalledHost
from eep.control.supervisor.spin_watch import SpinWatch
from eep.control.supervisor.stall_watch import StallWatch
from eep.control.supervisor.start_watch import StartWatch
from eep.control.supervisor.stopped_watch import StoppedWatch


class ProgressWords(Protocol):
    """Where the words of the ranks are read."""

    def progress_of(self, rank: int) -> int | None: ...

    def run_word_of(self, rank: int) -> tuple[int, int] | None: ...


class RankWatches:
    """``pids``: the process of each rank."""

    def __init__(self, host: StalledHost, words: ProgressWords, pids: Callable[[], Mapping[int, int]]) -> None:
        self._stalls = StallWatch(host, words.progress_of)
        hangs = HangWatch(host, words.run_word_of, lambda rank: pids().get(rank))
        spins = SpinWatch(host, words.run_word_of, lambda rank: pids().get(rank))
        self._starts = StartWatch(host, pids)
        self._all = (self._stalls, StoppedWatch(host, pids), hangs, spins, self._starts)

    def start(self) -> None:
        for watch in self._all:
            watch.start()

    def cancel(self) -> None:
        for watch in self._all:
            watch.cancel()

    def still_for(self, rank: int) -> float | None:
        """For how many seconds a rank has made no progress; None while it need not make any, and while it starts and nothing
        says that it stands still."""
        still = self._stalls.still_for(rank)
        return self._starts.still_for(rank) if still is None else still
