"""A change as spans: with a stand-in for OpenTelemetry, and with its own library where that is installed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from eep.observe.change_span import ChangeSpans
from eep.observe.change_summary import EndedChange

CHANGE = EndedChange(4, 3, ((2, 0),), ("exit",), (), 10.0, 10.005, 10.03, 12, {"peer": 18}, 6)
SECOND = 10**9


class Span:
    def __init__(self, name: str, start_time: int, context: Any = None, attributes: Any = None) -> None:
        self.name, self.start, self.context, self.attributes = name, start_time, context, attributes
        self.end_time: int | None = None

    def end(self, end_time: int) -> None:
        self.end_time = end_time


class Tracing:
    """The module ``opentelemetry.trace``, and its tracer."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def get_tracer(self, name: str) -> Tracing:
        assert name == "eep"
        return self

    def start_span(self, name: str, **named: Any) -> Span:
        self.spans.append(Span(name, **named))
        return self.spans[-1]

    def set_span_in_context(self, span: Span) -> Span:
        return span


def test_a_change_is_a_span_with_its_parts_inside() -> None:
    tracing = Tracing()
    ChangeSpans(tracing, lambda: 1000.0)(CHANGE)
    whole, agree, repair = tracing.spans
    assert [(span.name, span.start, span.end_time) for span in tracing.spans] == [
        ("eep.change", 1010 * SECOND, 1010 * SECOND + 30_000_000),
        ("eep.agree", 1010 * SECOND, 1010 * SECOND + 5_000_000),
        ("eep.repair", 1010 * SECOND + 5_000_000, 1010 * SECOND + 30_000_000),
    ]
    assert agree.context is repair.context is whole
    assert (whole.attributes["eep.requests_moved"], whole.attributes["eep.bytes.peer"]) == (6, 18)


def test_without_opentelemetry_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    ChangeSpans()(CHANGE)


def test_its_own_library_takes_the_spans() -> None:
    sdk: Any = pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")
    export: Any = importlib.import_module("opentelemetry.sdk.trace.export")
    memory: Any = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    tracing: Any = importlib.import_module("opentelemetry.trace")
    exporter, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    stand_in = Tracing()
    stand_in.get_tracer = provider.get_tracer  # type: ignore[method-assign]
    stand_in.set_span_in_context = tracing.set_span_in_context  # type: ignore[method-assign]
    ChangeSpans(stand_in)(CHANGE)
    agree, repair, whole = exporter.get_finished_spans()
    assert [span.name for span in (agree, repair, whole)] == ["eep.agree", "eep.repair", "eep.change"]
    assert agree.parent.span_id == repair.parent.span_id == whole.context.span_id
    assert whole.attributes["eep.lost"] == (2,)
