"""Takes connections from a listening socket, in an event loop, also on a host that runs out of descriptors.

A connection that cannot be taken stays in the queue, and its socket stays readable. A loop that tried again at once would
do nothing else, so the listener waits a moment first.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

AGAIN_AFTER = 1.0


class ConnectionListener:
    """Owns ``sock``, which listens and does not block. ``took`` gets each connection; ``failed`` hears of those not taken."""

    def __init__(
        self, sock: socket.socket, took: Callable[[socket.socket], None], failed: Callable[[OSError], None]
    ) -> None:
        self.socket, self._took, self._failed = sock, took, failed
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._begin()

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self.socket)
        self.socket.close()

    def _begin(self) -> None:
        self._again = None
        self._loop.add_reader(self.socket, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self.socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            self._loop.remove_reader(self.socket)
            self._again = self._loop.call_later(AGAIN_AFTER, self._begin)
            self._failed(error)
            return
        self._took(connection)
