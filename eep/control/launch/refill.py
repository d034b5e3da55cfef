"""When another spare process is prepared. Pure: the time is what it is told.

Preparing a spare takes a core for as long as importing an engine does, and a rank that starts needs that core more. So
no spare is prepared until every started rank runs, or has had its time, and spares are prepared one after the other.
With free cores only the first ranks are waited for: the next rank that is lost should find a spare. After a spare died
the next one is tried later and later.
"""

from __future__ import annotations

from collections.abc import Mapping

SETTLES_WITHIN = 60.0
"""A rank that was started and does not run by then is no longer waited for."""
SHORTEST, LONGEST = 1.0, 60.0
"""How long to wait after a spare died: twice as long each time in a row, between these."""


class Refill:
    """Keeps ``wanted`` spares. All times are seconds of one clock that never goes back.

    ``free_cores``: how many there are that no rank needs.
    """

    def __init__(self, wanted: int, *, free_cores: int = 0, settles_within: float = SETTLES_WITHIN) -> None:
        if wanted < 0:
            raise ValueError(f"there cannot be {wanted} spares; 0 turns them off")
        self.wanted = wanted
        self._free_cores, self._settles_within = max(0, free_cores), settles_within
        self._starting: dict[int, tuple[int, float]] = {}
        self._failures = 0
        self._not_before = 0.0

    def launched(self, now: float, rank: int, incarnation: int) -> None:
        """A rank is being started."""
        if incarnation == 0 or not self._free_cores:
            self._starting[rank] = (incarnation, now + self._settles_within)

    def runs(self, incarnations: Mapping[int, int]) -> None:
        """These ranks, as these incarnations, run."""
        for rank, incarnation in incarnations.items():
            if rank in self._starting and incarnation >= self._starting[rank][0]:
                del self._starting[rank]

    def taken(self) -> None:
        """A spare was used: they can be prepared."""
        self._failures = 0

    def died(self, now: float, lived: float) -> None:
        """A spare ended without being used, ``lived`` seconds after it was started."""
        self._failures = 1 if lived >= LONGEST else self._failures + 1
        self._not_before = now + min(LONGEST, SHORTEST * 2.0 ** min(self._failures - 1, 16))

    def wait(self, now: float, ready: int, preparing: int) -> float | None:
        """Seconds until one more is to be started, 0 if that is now; None: not before something happens."""
        if preparing >= max(1, self._free_cores) or ready + preparing >= self.wanted:
            return None
        deadlines = [deadline for _, deadline in self._starting.values()]
        return max(0.0, max([self._not_before, *deadlines]) - now)
