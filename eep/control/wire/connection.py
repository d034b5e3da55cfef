"""A sealed connection on a socket that never blocks, as a supervisor needs it.

What cannot be sent at once is kept, up to a limit. The connection to a peer that does not read is closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from eep.control.wire.messages import MAX_DEVICE_FILES, MAX_PAGES
from eep.control.wire.sealed_frames import ReceivedMessage, SealedChannel, SessionEnd, WireError

MAX_UNSENT = 4 << 20
MAX_DESCRIPTORS = MAX_PAGES + 1 + MAX_DEVICE_FILES
"""The pages of a rank, its pulse and its device files."""
_READ_BYTES = 1 << 16


class Connection:
    """``received`` is called with each message that verifies; ``closed`` once, with what to count and why.

    A connection that ends in order closes with kind "".
    """

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        accepts: Any,
        *,
        received: Callable[[Connection, ReceivedMessage[Any]], None],
        closed: Callable[[Connection, str, str], None],
        end: SessionEnd = SessionEnd.SERVER,
    ) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._channel: SealedChannel[Any] = SealedChannel(key, end, accepts)
        self._received, self._closed = received, closed
        self._unsealed: list[tuple[msgspec.Struct, int]] = []
        """What was to be sent before the other side had greeted."""
        self._unsent = bytearray()
        self._descriptors: list[int] = []
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)
        self._write(self._channel.greeting())

    def send(self, message: msgspec.Struct, epoch: int = 0) -> None:
        """Send now or soon; never waits. On a connection that has closed it does nothing."""
        if not self._open:
            return
        if self._channel.established:
            self._write(self._channel.seal(message, epoch))
        else:
            self._unsealed.append((message, epoch))

    def take_descriptor(self) -> int | None:
        """The oldest descriptor that came along and was not taken yet; the caller must close it."""
        return self._descriptors.pop(0) if self._descriptors else None

    def close(self, kind: str = "", reason: str = "") -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._closed(self, kind, reason)

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, MAX_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        if not data:
            self.close()
            return
        if len(self._descriptors) > MAX_DESCRIPTORS:
            self.close("too-many-descriptors", "a peer sent more descriptors than a registration has")
            return
        try:
            messages = self._channel.feed(data)
        except WireError as error:
            self.close(error.kind, str(error))
            return
        if self._unsealed and self._channel.established:
            unsealed, self._unsealed = self._unsealed, []
            for held, epoch in unsealed:
                self.send(held, epoch)
        for message in messages:
            if self._open:
                self._received(self, message)

    def _write(self, data: bytes) -> None:
        self._unsent += data
        if len(self._unsent) > MAX_UNSENT:
            self.close("slow-peer", "a peer does not read its messages")
            return
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)
