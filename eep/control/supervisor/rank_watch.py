"""What the looks of a supervisor at its ranks have in common: they come at regular times, and some rank may have stalled."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from eep.membership import Event, HostState, Standstill, has_stalled


class StalledHost(Protocol):
    """What a watch asks of its supervisor."""

    @property
    def state(self) -> HostState: ...

    def feed(self, event: Event) -> None: ...


class RankWatch(ABC):
    """Looks every ``pause`` seconds. A rank may stand still for ``deadline`` seconds; 0: for ever, without looks."""

    def __init__(self, host: StalledHost, deadline: float, pause: float) -> None:
        self._host, self._deadline, self.pause = host, deadline, pause
        self._seen: Mapping[int, Standstill] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """In the running event loop."""
        if self._deadline > 0:
            self._timer = asyncio.get_running_loop().call_later(self.pause, self._tick)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def look(self, now: float) -> None:
        """Look at every rank, then tell the core of those that have stalled."""
        self._seen = self._see(now)
        for rank, each in self._seen.items():
            if has_stalled(each, self._deadline):
                self._host.feed(self._event(rank, each))

    def still_for(self, rank: int) -> float | None:
        """For how many seconds this watch has seen a rank stand still; None if it has not, or need not look."""
        seen = self._seen.get(rank)
        return None if seen is None else round(seen.seconds, 1)

    @abstractmethod
    def _see(self, now: float) -> Mapping[int, Standstill]:
        """The ranks that stand still, and for how long they have been seen to."""

    @abstractmethod
    def _event(self, rank: int, seen: Standstill) -> Event: ...

    def _tick(self) -> None:
        self.start()
        self.look(time.monotonic())
