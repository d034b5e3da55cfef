"""``GET /eep/events``: the event log as server-sent events, from the line after the one that a reader has."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

from eep.observe.event_feed import EventFeed
from eep.observe.event_log import fields_of

MOST_STREAMS = 32
_LOOKS_EVERY = 0.5
"""How soon a stream ends when the server does."""
_SPEAKS_EVERY = 15.0
"""Proxies end a connection that is silent for long."""


class EventStreams:
    """All streams of a server. ``is_ending``: whether the server ends, and its streams are to end."""

    def __init__(self, feed: EventFeed, is_ending: Callable[[], bool]) -> None:
        self.feed, self._is_ending = feed, is_ending
        self.open = 0

    @property
    def is_full(self) -> bool:
        return self.open >= MOST_STREAMS

    async def stream(self, last: str) -> AsyncIterator[bytes]:
        """The events after the id ``last``, until the server ends or the reader goes."""
        self.open += 1
        try:
            yield b"retry: 1000\n\n"
            silent = 0.0
            while not self._is_ending():
                lines = self.feed.after(last)
                for last, line in lines:
                    yield encode_event(last, line)
                if lines or silent >= _SPEAKS_EVERY:
                    silent = 0.0
                    yield b": \n\n"
                await self.feed.wait(_LOOKS_EVERY)
                silent += _LOOKS_EVERY
        finally:
            self.open -= 1


def encode_event(ident: str, line: str) -> bytes:
    """One event. A browser that asks for no name gets none, so the phase of the line is in it too."""
    return f"id: {ident}\ndata: {json.dumps(fields_of(line))}\n\n".encode()
