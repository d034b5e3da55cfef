"""Lets go of the memory of ranks that will not come back: those that an operator has removed, and those that were given up.

Not at once: the requests of such a rank go on at others, which copy their contexts from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from eep.anchor.anchor import let_go
from eep.membership import Effect, RankGone

COPIED_WITHIN = 60.0
"""Seconds in which every request of a rank that is gone has begun at another, as a rule. Others are computed again."""


class MemoryRelease:
    """``comes_back(rank)`` says whether a rank runs, or will run again."""

    def __init__(self, directory: Path, comes_back: Callable[[int], bool], after: float = COPIED_WITHIN) -> None:
        self._directory, self._comes_back, self._after = directory, comes_back, after

    def follow(self, effect: Effect) -> None:
        """Called with each effect of the supervisor, in the thread of its event loop."""
        if isinstance(effect, RankGone):
            asyncio.get_running_loop().call_later(self._after, self._look, effect.rank, effect.incarnation)

    def _look(self, rank: int, incarnation: int) -> None:
        if not self._comes_back(rank):
            # In a thread: the keeper answers at once as a rule, and has two seconds.
            asyncio.get_running_loop().run_in_executor(None, let_go, self._directory, rank, incarnation)
