"""What looks at the threads of ranks have in common: only a rank whose word says that it runs, and has not changed since the
last look, can have got stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eep.control.supervisor.rank_watch import RankWatch, StalledHost
from eep.membership import must_advance

PAUSE = 0.1
"""Seconds between two looks."""

RunWord = Callable[[int], tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class StillRank:
    """A rank whose word is that of the last look."""

    rank: int
    incarnation: int
    word: int
    pid: int
    thread: int


class RunWatch(RankWatch):
    """``run_word`` of a rank: what it has last said, and the thread that said so. ``pid_of`` a rank."""

    def __init__(self, host: StalledHost, run_word: RunWord, pid_of: Callable[[int], int | None]) -> None:
        super().__init__(host, host.state.policy.hung_deadline, PAUSE)
        self._run_word, self._pid_of = run_word, pid_of
        self._words: dict[int, tuple[int, int] | None] = {}

    def _still_ranks(self) -> Iterator[StillRank]:
        """Once a look. A rank whose word has changed costs a load of it. Only of others is the kernel asked."""
        before, self._words = self._words, {}
        for rank, local in self._host.state.ranks.items():
            if not must_advance(self._host.state, rank):
                continue
            self._words[rank] = word = self._run_word(rank)
            pid = self._pid_of(rank)
            if word is not None and word == before.get(rank) and pid is not None:
                yield StillRank(rank, local.incarnation, word[0], pid, word[1])
