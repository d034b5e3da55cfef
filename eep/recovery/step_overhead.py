"""What EEP's bookkeeping adds to a step on the host of a rank: measured by itself between two steps, now and then, so that no
step pays for a clock.

It is what a step without a fault does because ranks may be lost: the boundary looks for news and for orders, every exchange
of tokens says that the rank gets on, and the end of the step looks whether it can be trusted. Waiting for peers is no part of
it: ranks without EEP wait for each other, too.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

TIMES = 9
"""So many of the newest measurements count."""
EVERY = 1000
"""So many steps lie between two of them."""


class StepOverhead:
    """``each_step`` is called once in a step, ``each_exchange`` as often as a step exchanges tokens through the host.
    ``tell`` gets the seconds of a step: the median of the newest measurements, for one may have waited for a processor."""

    def __init__(
        self,
        each_step: Sequence[Callable[[], object]],
        each_exchange: Sequence[Callable[[], object]],
        exchanges: int,
        tell: Callable[[float], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._each_step, self._each_exchange, self._exchanges = each_step, each_exchange, exchanges
        self._tell, self._clock = tell, clock
        self._steps = 0
        self._seconds = deque((self._measure() for _ in range(TIMES)), TIMES)
        tell(statistics.median(self._seconds))

    def stepped(self) -> None:
        """Another step begins."""
        self._steps += 1
        if self._steps % EVERY == 0:
            self._seconds.append(self._measure())
            self._tell(statistics.median(self._seconds))

    def _measure(self) -> float:
        began = self._clock()
        for call in self._each_step:
            call()
        for _ in range(self._exchanges):
            for call in self._each_exchange:
                call()
        return self._clock() - began
