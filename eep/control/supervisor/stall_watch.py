"""The supervisor's looks at the progress words of its ranks. A rank that stands still for too long is told to the core.

Peers notice a rank that keeps them waiting. Ranks that all stand still at once wait for no peer: only this watch sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from eep.control.supervisor.rank_watch import RankWatch, StalledHost
from eep.membership import Event, Stalled, Standstill, after_look, must_advance

_LOOKS_PER_DEADLINE = 20
_LONGEST_PAUSE = 1.0


class StallWatch(RankWatch):
    """``progress_of`` reads the word of a rank; None: it need not advance now."""

    def __init__(self, host: StalledHost, progress_of: Callable[[int], int | None]) -> None:
        deadline = host.state.policy.stall_deadline
        super().__init__(host, deadline, min(_LONGEST_PAUSE, deadline / _LOOKS_PER_DEADLINE))
        self._progress_of = progress_of

    def _see(self, now: float) -> Mapping[int, Standstill]:
        state, seen = self._host.state, {}
        for rank, local in state.ranks.items():
            word = self._progress_of(rank) if must_advance(state, rank) else None
            if word is not None:
                # Twice the pause: a busy machine may be late with a look, and it still counts.
                seen[rank] = after_look(self._seen.get(rank), local.incarnation, word, now, 2 * self.pause)
        return seen

    def _event(self, rank: int, seen: Standstill) -> Event:
        return Stalled(rank, seen.incarnation, seen.seconds)
