"""How much each rank has to do, and which has the least.

A rank that serves two requests of ten thousand tokens has more to do than one with five of a hundred: it computes them, and
every other rank waits for it in each step. So what a lost rank leaves behind is spread by the tokens that it brings along.
New requests go by the measure that the server's operator has chosen.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection


class Measure(enum.Enum):
    REQUESTS = "requests"
    TOKENS = "tokens"


class RankLoads:
    """Kept up to date rather than counted: every request asks for them, and thousands may be open."""

    def __init__(self) -> None:
        self._requests: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()

    def add(self, rank: int, tokens: int) -> None:
        """The rank serves a request of that many tokens, prompt and answer so far."""
        self._requests[rank] += 1
        self._tokens[rank] += tokens

    def grow(self, rank: int, tokens: int) -> None:
        """The answer of one of its requests has grown."""
        self._tokens[rank] += tokens

    def remove(self, rank: int, tokens: int) -> None:
        """The rank no longer serves a request, which had grown to that many tokens."""
        self._requests[rank] -= 1
        self._tokens[rank] -= tokens

    def requests(self) -> dict[int, int]:
        return {rank: count for rank, count in self._requests.items() if count}

    def tokens(self) -> dict[int, int]:
        return {rank: count for rank, count in self._tokens.items() if count}

    def least(self, active: Collection[int], measure: Measure = Measure.REQUESTS) -> int | None:
        """The least loaded rank, the lowest of equals; None when there is none."""

        def load(rank: int) -> tuple[int, int, int]:
            requests, tokens = self._requests[rank], self._tokens[rank]
            return (requests, tokens, rank) if measure is Measure.REQUESTS else (tokens, requests, rank)

        return min(active, key=load, default=None)
