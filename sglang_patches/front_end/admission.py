"""Whether requests are accepted: their fields are checked, the server must not drain, and there may be only so many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_patches.front_end import finish_reasons, ledger_adapter
from sglang_patches.front_end.request_limits import RequestLimits, check_ranges
from sglang_patches.front_end.service_state import ServiceState


@dataclass(frozen=True)
class Admission:
    """``limits``: what the numbers of a request may be. ``most_open(ranks)``: how many requests may be open while so many
    ranks are in; None for any number."""

    service: ServiceState
    limits: RequestLimits | None = None
    most_open: Callable[[int], int | None] = lambda ranks: None

    def check(self, messages: Sequence[Any]) -> None:
        """ValueError if one of them cannot be served."""
        for message in messages:
            ledger_adapter.check_types(message)
            if self.limits is not None:
                check_ranges(message, self.limits)

    def why_full(self, more: int, open_requests: int, ranks: int) -> str | None:
        """Why so many more are not accepted now; None if they are."""
        if self.service.draining:
            return finish_reasons.DRAINING
        most = self.most_open(ranks)
        if most is None or open_requests + more <= most:
            return None
        return finish_reasons.FULL.format(open=open_requests)
