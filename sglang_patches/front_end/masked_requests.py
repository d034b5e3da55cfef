"""In the front end: which requests were computed, in part at least, while experts were masked. Their answers say so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from eep.observe.metrics import MetricsWriter
from sglang_patches.mask_mark import MARK

_MOST = 1 << 16
"""A client that is gone never takes its answer. So many are remembered."""


class MaskedRequests:
    def __init__(self, metrics: MetricsWriter) -> None:
        self._metrics = metrics
        self._ids: OrderedDict[str, None] = OrderedDict()
        metrics.add("requests_masked", 0)

    def add(self, request_id: str) -> None:
        if request_id not in self._ids:
            self._metrics.add("requests_masked", 1)
            self._ids[request_id] = None
            if len(self._ids) > _MOST:
                self._ids.popitem(last=False)

    def mark(self, answer: Any) -> None:
        """An answer, a part of one, or a list of answers is about to go to the client."""
        for each in answer if isinstance(answer, list) else (answer,):
            meta = each.get("meta_info") if isinstance(each, dict) else None
            if meta is not None and meta.get("id") in self._ids:
                meta[MARK] = True

    async def marking(self, answers: Any) -> AsyncIterator[Any]:
        """``answers``, marked where it is due."""
        async with aclosing(answers):
            async for answer in answers:
                self.mark(answer)
                yield answer
