"""The requests that no rank has, in order of acceptance.

Requests come and go at constant cost, however many wait. Only :meth:`WaitingLine.in_order` and :meth:`WaitingLine.overdue`
look at all of them: the caller asks for them when views change and once in a while, never for each request.
"""

from __future__ import annotations

from heapq import heappop, heappush

from eep.requests.request_records import LedgerEntry


class WaitingLine:
    """See the module. Whether a request is doubted does not change while it waits."""

    def __init__(self) -> None:
        self._entries: dict[str, LedgerEntry] = {}
        self._doubted: list[tuple[int, str]] = []
        """A heap. It still has requests that have left; they are taken off when they come to its front."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: LedgerEntry) -> None:
        self._entries[entry.request.id] = entry
        if entry.is_doubted:
            heappush(self._doubted, (entry.number, entry.request.id))

    def remove(self, entry: LedgerEntry) -> None:
        del self._entries[entry.request.id]

    def in_order(self) -> list[str]:
        return [entry.request.id for entry in sorted(self._entries.values(), key=lambda entry: entry.number)]

    def first_doubted(self) -> str | None:
        while self._doubted:
            number, request_id = self._doubted[0]
            entry = self._entries.get(request_id)
            if entry is not None and entry.number == number:
                return request_id
            heappop(self._doubted)
        return None

    def overdue(self, now: float, limit: float) -> list[LedgerEntry]:
        """Those that have waited for ``limit`` seconds."""
        return [entry for entry in self._entries.values() if now - entry.waiting_since >= limit]
