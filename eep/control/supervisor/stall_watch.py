"""The supervisor's looks at the progress words of its ranks. A rank that stands still for too long is told to the core.

Peers notice a rank that keeps them waiting. Ranks that all stand still at once wait for no peer: only this watch sees them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from eep.membership import Event, HostState, Stalled, Standstill, after_look, has_stalled, must_advance

_LOOKS_PER_DEADLINE = 20
_LONGEST_PAUSE = 1.0


class StalledHost(Protocol):
    """What the watch asks of its supervisor."""

    @property
    def state(self) -> HostState: ...

    def feed(self, event: Event) -> None: ...


class StallWatch:
    """``progress_of`` reads the word of a rank; None: it need not advance now."""

    def __init__(self, host: StalledHost, progress_of: Callable[[int], int | None]) -> None:
        self._host, self._progress_of = host, progress_of
        self._deadline = host.state.policy.stall_deadline
        self.pause = min(_LONGEST_PAUSE, self._deadline / _LOOKS_PER_DEADLINE)
        """Seconds between two looks."""
        self._seen: dict[int, Standstill] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look now and then, in the running event loop. Does nothing without a deadline."""
        if self._deadline > 0:
            self._timer = asyncio.get_running_loop().call_later(self.pause, self._tick)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def still_for(self, rank: int) -> float | None:
        """For how many seconds a rank has made no progress; None while it need not make any."""
        seen = self._seen.get(rank)
        return None if seen is None else round(seen.seconds, 1)

    def look(self, now: float) -> None:
        """Look at every rank, then tell the core of those that have stalled."""
        state, seen = self._host.state, {}
        for rank, local in state.ranks.items():
            word = self._progress_of(rank) if must_advance(state, rank) else None
            if word is not None:
                # Twice the pause: a busy machine may be late with a look, and it still counts.
                seen[rank] = after_look(self._seen.get(rank), local.incarnation, word, now, 2 * self.pause)
        self._seen = seen
        for rank, each in seen.items():
            if has_stalled(each, self._deadline):
                self._host.feed(Stalled(rank, each.incarnation, each.seconds))

    def _tick(self) -> None:
        self.start()
        self.look(time.monotonic())
