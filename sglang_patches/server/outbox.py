"""What the controller sends to schedulers: never waiting for one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class Outbox:
    """Sends to schedulers without ever waiting. What cannot be sent at once is kept until it can, or its rank is gone."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._unsent: dict[int, deque[Any]] = {}
        self._sockets: dict[int, Any] = {}

    def __call__(self, socket: Any, message: Any, flags: int = 0) -> None:
        key = id(socket)
        self._sockets[key] = socket
        unsent = self._unsent.setdefault(key, deque())
        unsent.append(message)
        self._flush(key)

    def flush(self) -> None:
        for key in [key for key, unsent in self._unsent.items() if unsent]:
            self._flush(key)

    def forget(self, socket: Any) -> None:
        """Its rank is gone: the front end sends what it had anew, to others."""
        self._unsent.pop(id(socket), None)

    def _flush(self, key: int) -> None:
        import zmq

        unsent = self._unsent[key]
        while unsent:
            try:
                self._send(self._sockets[key], unsent[0], flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            unsent.popleft()
