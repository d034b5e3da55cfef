"""A change of who is in as spans of OpenTelemetry, in a process whose tracing another library has set up."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from eep.observe.change_summary import EndedChange

_BILLION = 10**9


class ChangeSpans:
    """One span for each change, with one inside for the time to agree and one for the repair. Does nothing where
    OpenTelemetry is not installed. ``tracing``: its ``trace`` module, looked up at the first change."""

    def __init__(
        self, tracing: Any = None, offset: Callable[[], float] = lambda: time.time() - time.monotonic()
    ) -> None:
        self._tracing, self._offset = tracing, offset

    def __call__(self, ended: EndedChange) -> None:
        if self._tracing is None:
            try:
                self._tracing = importlib.import_module("opentelemetry.trace")
            except ImportError:
                return
        tracer, offset = self._tracing.get_tracer("eep"), self._offset()
        began, agreed, over = (
            int((at + offset) * _BILLION) for at in (ended.began_at, ended.agreed_at, ended.ended_at)
        )
        attributes = {f"eep.{name}": value for name, value in ended.fields().items() if name != "bytes"}
        attributes |= {f"eep.bytes.{tier}": count for tier, count in ended.sources.items()}
        whole = tracer.start_span("eep.change", start_time=began, attributes=attributes)
        inside = self._tracing.set_span_in_context(whole)
        for name, start, end in (("eep.agree", began, agreed), ("eep.repair", agreed, over)):
            tracer.start_span(name, context=inside, start_time=start).end(end_time=end)
        whole.end(end_time=over)
