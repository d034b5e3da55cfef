"""Which requests were sent to a rank that has not said yet that it received them."""

from __future__ import annotations

from eep.requests.request_records import LedgerEntry


class Receipts:
    """A receipt is a word of a rank, or its first output. Each request is here from its sending to its receipt."""

    def __init__(self) -> None:
        self._expected: dict[str, tuple[float, LedgerEntry]] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, entry: LedgerEntry, now: float) -> None:
        self._expected[entry.wire] = (now, entry)

    def forget(self, wire: str) -> None:
        """It came, or no caller waits for it any more. A second call does nothing."""
        self._expected.pop(wire, None)

    def overdue(self, now: float, limit: float) -> list[LedgerEntry]:
        """Those whose receipt did not come within ``limit`` seconds. Each move without a token doubles the limit: ranks that
        are all slow would otherwise be sent the same requests again and again."""
        return [entry for sent, entry in self._expected.values() if now - sent >= limit * 2**entry.fruitless_moves]
