"""The timers that the core asks a supervisor for: each feeds its deadline back when it fires.

A deadline is for an epoch or for a life of a rank, by its number. Once one with a higher number is set, those before it
mean nothing, and go: a rank may have an hour to start, and may have had a thousand lives by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from eep.membership import Deadline, Event, SetTimer, Timer


@dataclass
class _Pending:
    """The timers of one kind, of one rank, that were set for the same epoch or life."""

    number: int
    handles: set[asyncio.TimerHandle] = field(default_factory=set)

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()


class DeadlineTimers:
    """Timers of the running event loop. ``feed`` gets the deadline of each that fires."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        self._pending: dict[tuple[Timer, int], _Pending] = {}

    def set(self, effect: SetTimer) -> None:
        pending = self._those_beside(effect.deadline)

        def fire() -> None:
            pending.handles.discard(handle)
            self._feed(effect.deadline)

        handle = asyncio.get_running_loop().call_later(effect.delay, fire)
        pending.handles.add(handle)

    def cancel(self) -> None:
        """None of them fires any more."""
        for pending in self._pending.values():
            pending.cancel()
        self._pending.clear()

    def _those_beside(self, deadline: Deadline) -> _Pending:
        key = (deadline.timer, deadline.rank)
        pending = self._pending.get(key)
        if pending is None or pending.number < deadline.number:
            if pending is not None:
                pending.cancel()
            pending = self._pending[key] = _Pending(deadline.number)
        return pending
