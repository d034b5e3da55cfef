"""Which requests may be what ends ranks.

- When an exception ended a rank, the requests that it had given no token yet are *doubted*: one of them may be the cause. A
  rank serves one doubted request at a time, so that none is blamed for another. The next token ends the doubt. If an
  exception ends its next rank too, the request is to be given up; not so if a rank that did not serve it was lost just
  before, since then that may be the cause.
- A request whose ranks are lost again and again, however they end, is to be given up too. Where other ranks are lost as well
  something else may end them, and the request gets more tries.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence

from eep.requests.request_records import LedgerEntry, RequestState

MOST_FRUITLESS_MOVES = 8
"""How often a request may move without a new token, if hardly any other rank was lost meanwhile."""
MOST_MOVES_IN_A_STORM = 32
"""The same where other ranks were lost too."""
SAME_CAUSE_WITHIN = 1.0
"""Seconds between two losses that may have one cause: ranks that share a GPU may fail together."""

LOST_OFTEN = "it was sent to a rank {count} times, and each time the rank or its output was lost"
FAILED_TWICE = "an exception ended each of the last two ranks that served it"


class Blame:
    """Told what happens to requests and ranks; says which requests to serve apart, and which to give up."""

    def __init__(self) -> None:
        self._doubted_at: Counter[int] = Counter()
        """How many of the requests that each rank serves are doubted."""
        self._losses: deque[tuple[float, tuple[int, int]]] = deque()
        """When which lives were lost, in the last :data:`SAME_CAUSE_WITHIN` seconds."""
        self._lives_lost = 0

    def apart(self, active: Collection[int]) -> list[int]:
        """The ranks that serve no doubted request."""
        return [rank for rank in active if not self._doubted_at[rank]]

    # What happens to a request.

    def assigned(self, entry: LedgerEntry) -> None:
        """Its rank serves it from now on."""
        entry.has_token_of_rank = False
        self._doubted_at[entry.rank] += entry.is_doubted

    def left(self, entry: LedgerEntry) -> None:
        """Its rank no longer serves it."""
        self._doubted_at[entry.rank] -= entry.is_doubted

    def cleared(self, entry: LedgerEntry) -> None:
        """Its rank has given a new token."""
        entry.fruitless_moves, entry.has_token_of_rank = 0, True
        if entry.is_doubted:
            entry.is_doubted = False
            self._doubted_at[entry.rank] -= 1

    def moved(self, entry: LedgerEntry) -> None:
        """It is to be served elsewhere."""
        if not entry.fruitless_moves:
            entry.lost_before = self._lives_lost - 1
        entry.fruitless_moves += 1

    # What happens to ranks.

    def rank_lost(
        self, life: tuple[int, int], served: Sequence[LedgerEntry], now: float, *, failed: bool
    ) -> list[LedgerEntry]:
        """A rank and incarnation was lost, which served these. Returns those that are to be given up."""
        while self._losses and now - self._losses[0][0] > SAME_CAUSE_WITHIN:
            self._losses.popleft()
        others = {other for _, other in self._losses if other != life}
        if life not in (known for _, known in self._losses):
            self._losses.append((now, life))
            self._lives_lost += 1
        return self._doubt(served, life, others) if failed else []

    def seems_to_end_ranks(self, entry: LedgerEntry) -> bool:
        """Ranks are lost wherever it goes, and few others are."""
        its_own = entry.fruitless_moves + 1
        others = self._lives_lost - entry.lost_before - its_own
        most = MOST_FRUITLESS_MOVES if others <= its_own // 4 else MOST_MOVES_IN_A_STORM
        return entry.fruitless_moves >= most

    def _doubt(
        self, served: Sequence[LedgerEntry], life: tuple[int, int], others: set[tuple[int, int]]
    ) -> list[LedgerEntry]:
        movable = [e for e in served if e.state is RequestState.RUNNING and not e.request.immovable]
        doubted = [e for e in movable if not e.has_token_of_rank] or movable
        harmful = [e for e in doubted if e.is_doubted and not others - {e.doubted_since}]
        for entry in doubted:
            if not entry.is_doubted:
                entry.is_doubted, entry.doubted_since = True, life
                self._doubted_at[entry.rank] += 1
        return harmful
