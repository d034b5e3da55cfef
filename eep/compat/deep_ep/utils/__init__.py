"""Where programs written for DeepEP import its events from, too."""

from __future__ import annotations

from eep.compat.stream_events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
