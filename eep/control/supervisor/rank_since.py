"""Since when each rank of a host has stood where it stands, for operators."""

from __future__ import annotations

import time
from collections.abc import Callable

from eep.membership import HostState


class RankSince:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._stood: dict[int, tuple[object, ...]] = {}
        self.times: dict[int, float] = {}
        """Seconds since 1970, of each rank."""

    def follow(self, state: HostState) -> None:
        """An event has passed."""
        for rank, local in state.ranks.items():
            stands = (local.status, local.incarnation, state.is_in(rank))
            if self._stood.get(rank) != stands:
                self._stood[rank], self.times[rank] = stands, self._clock()
