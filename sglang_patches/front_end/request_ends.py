"""Ends requests that no rank ends, each with an answer for its client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from eep.requests.request_records import LossOutcome
from sglang_patches.front_end import finish_reasons

logger = logging.getLogger(__name__)


class RequestEnds:
    """``answer(id, finish_reason, prompt_tokens)`` ends a request with a message of ours. ``kept`` has the open ones."""

    def __init__(self, answer: Callable[[str, dict[str, Any] | None, int], None], kept: dict[str, Any]) -> None:
        self._answer, self._kept = answer, kept

    def end(self, request_id: str, finish_reason: dict[str, Any] | None) -> None:
        kept = self._kept.pop(request_id, None)
        self._answer(request_id, finish_reason, len(getattr(kept, "input_ids", None) or ()))

    def end_lost(self, lost: LossOutcome, cause: str) -> None:
        """Those of a loss that go on nowhere. ``cause`` says what was lost."""
        for request_id in lost.aborted:
            self.end(request_id, None)
        for request_id in lost.complete:
            self.end(request_id, {"type": "length", "length": self._kept[request_id].sampling_params.max_new_tokens})
        for request_id, why in lost.failed:
            self.end(request_id, finish_reasons.try_again(cause.format(why=why)))
        for request_id, why in lost.harmful:
            logger.error("request %s is ended: %s", request_id, why)
            self.end(request_id, finish_reasons.failed(finish_reasons.HARMFUL.format(why=why)))
