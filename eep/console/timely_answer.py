"""An answer of HTTP of which no read waits for longer than is left, however slowly its bytes come."""

from __future__ import annotations

import http.client
import io
import socket
from collections.abc import Callable
from typing import Any


class TimelyAnswer(http.client.HTTPResponse):
    """``wait``: how many seconds the next read may take. TimeoutError where none are left."""

    def __init__(self, sock: socket.socket, *arguments: Any, wait: Callable[[], float], **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self._socket = sock
        self.fp = io.BufferedReader(_TimelyBytes(self.fp.detach(), sock, wait))

    def close(self) -> None:
        """The connection ends with its answer."""
        super().close()
        self._socket.close()


class _TimelyBytes(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: socket.socket, wait: Callable[[], float]) -> None:
        self._raw, self._socket, self._wait = raw, sock, wait

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int | None:
        left = self._wait()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        return self._raw.readinto(room)

    def close(self) -> None:
        self._raw.close()
        super().close()
