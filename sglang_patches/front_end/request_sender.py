"""Sends requests to ranks: which rank gets one, and what waits while there is none for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from eep.requests.ledger import Ledger
from sglang_patches.front_end import ledger_adapter
from sglang_patches.front_end.serving_ranks import ServingRanks
from sglang_patches.sampling.seeds import Seeds

logger = logging.getLogger(__name__)
MAY_DIFFER = "may continue differently"
"""What the log says of a request that moves and is sampled without a seed."""


class RequestSender:
    """``dispatch`` sends a message to the controller. ``kept`` has what it takes to send a request again."""

    def __init__(
        self,
        dispatch: Callable[[Any], None],
        ledger: Ledger,
        ranks: ServingRanks,
        seeds: Seeds | None,
        clock: Callable[[], float],
    ) -> None:
        self._dispatch, self._ledger, self._ranks, self._seeds, self._clock = dispatch, ledger, ranks, seeds, clock
        self.kept: dict[str, Any] = {}
        self._check: Any = None

    def keep(self, message: Any) -> None:
        self.kept[message.rid] = ledger_adapter.kept_copy(message, self._seeds)

    def send_check(self, message: Any) -> None:
        """Health checks are not in the ledger: a busy scheduler drops one silently, and SGLang forgets it without an abort.
        While no rank is in, the last check waits, since the first may come before the first view. One is enough: an answer
        of any rank answers all checks."""
        rank = self._rank_for(message)
        self._check = message if rank is None else None
        if rank is not None:
            check = ledger_adapter.kept_copy(message, self._seeds)
            check.routed_dp_rank = rank
            self._dispatch(check)

    def send_waiting_check(self) -> None:
        if self._check is not None:
            self.send_check(self._check)

    def send(self, request_id: str) -> Exception | None:
        """Send a request that waits, if there is a rank for it. If it cannot be sent, it is over, and its error returned."""
        kept = self.kept[request_id]
        rank = self._rank_for(kept, request_id)
        if rank is None:
            return None  # it may be what ends ranks, and waits for one that has no other such request
        replay, life = self._ledger.replay_of(request_id), self._ranks.serving[rank]
        if replay.inexact:
            logger.warning("request %s %s on rank %d: %s", request_id, MAY_DIFFER, rank, replay.inexact)
        try:
            self._dispatch(ledger_adapter.message_for(kept, replay, rank, life))
        except Exception as error:
            self._ledger.ended(request_id)
            return error
        self._ledger.assigned(request_id, rank, life, self._clock())
        return None

    def _rank_for(self, message: Any, request_id: str = "") -> int | None:
        serving = self._ranks.serving
        asked = getattr(message, "routed_dp_rank", None)
        if request_id and (asked not in serving or self._ledger.entry(request_id).is_doubted):
            return self._ledger.rank_for(request_id, serving)
        return asked if asked in serving else self._ledger.loads.least(serving)
