"""The device files of ranks that share a GPU, held until the kernels that a killed rank leaves behind have ended.

See :mod:`eep.data_plane.device_files`. The supervisor has ended the waits of those kernels by then, so what is left is the
work of a step or two.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

HELD_FOR = 2.0
"""Seconds. Until then the memory of the rank is not free either: its next life needs longer to come to its own."""


class HeldFiles:
    def __init__(self) -> None:
        self._of_ranks: dict[int, list[int]] = {}
        self._of_the_dead: dict[asyncio.TimerHandle, list[int]] = {}

    def hold(self, rank: int, descriptors: Sequence[int]) -> None:
        """Takes over the descriptors of a rank that has begun."""
        self._of_ranks.setdefault(rank, []).extend(descriptors)

    def ended(self, rank: int) -> None:
        """The process of a rank has ended. A second call does nothing."""
        descriptors = self._of_ranks.pop(rank, [])
        if descriptors:
            loop = asyncio.get_running_loop()
            timer: asyncio.TimerHandle = loop.call_later(HELD_FOR, lambda: self._let_go(timer))
            self._of_the_dead[timer] = descriptors

    async def close(self) -> None:
        """Lets go of all, once what the ranks left behind has had its time: other servers may use the same GPU."""
        for rank in list(self._of_ranks):
            self.ended(rank)
        if self._of_the_dead:
            last = max(timer.when() for timer in self._of_the_dead)
            await asyncio.sleep(min(HELD_FOR, last - asyncio.get_running_loop().time()))
        for timer in list(self._of_the_dead):
            timer.cancel()
            self._let_go(timer)

    def _let_go(self, timer: asyncio.TimerHandle) -> None:
        for descriptor in self._of_the_dead.pop(timer, ()):
            os.close(descriptor)
