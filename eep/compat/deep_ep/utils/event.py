"""Where programs written for DeepEP's second version import its events from."""

from __future__ import annotations

from eep.compat.stream_events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
