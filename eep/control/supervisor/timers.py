"""The timers that the core asks a supervisor for: each feeds its deadline back when it fires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eep.membership import Event, SetTimer


class DeadlineTimers:
    """Timers of the running event loop. ``feed`` gets the deadline of each that fires."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        self._pending: set[asyncio.TimerHandle] = set()

    def set(self, effect: SetTimer) -> None:
        def fire() -> None:
            self._pending.discard(handle)
            self._feed(effect.deadline)

        handle = asyncio.get_running_loop().call_later(effect.delay, fire)
        self._pending.add(handle)

    def cancel(self) -> None:
        """None of them fires any more."""
        for handle in self._pending:
            handle.cancel()
        self._pending.clear()
