"""Sees to it that this host is heard: over its links or, where one fails, through its report in the store.

When neither can be relied on any more, the others may take this host for lost. It holds its ranks before they do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from eep.membership import must_write, relied_on_until


class WrittenReport(Protocol):
    """Our report in the store."""

    @property
    def written_at(self) -> float: ...

    def write_again(self) -> None: ...

    def hold(self) -> None: ...


class ReportKeeper:
    def __init__(self, report: WrittenReport, timeout: float) -> None:
        self._report, self._timeout = report, timeout

    def look(self, now: float, heard_at: Collection[float]) -> None:
        """``heard_at``: when we sent what each linked host has last confirmed."""
        if must_write(now, heard_at, self._timeout):
            self._report.write_again()
        if now > relied_on_until(self._report.written_at, heard_at, self._timeout):
            self._report.hold()
