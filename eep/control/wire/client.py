"""A blocking sealed connection to a supervisor, for ranks and operators."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path
from typing import Any

from eep.control.private_directory import PrivateDirectory
from eep.control.wire.messages import AskEvidence, AskOperation, AskStatus, ControlMessage, FromSupervisor, TellAnswer
from eep.control.wire.sealed_frames import ReceivedMessage, SealedChannel, SessionEnd

ANSWERS_WITHIN = 10.0
_READ_BYTES = 1 << 16


class SupervisorGone(ConnectionError):
    """The supervisor has ended, or does not answer."""


class Client:
    """One session. Sending is safe from any thread; receiving is for one."""

    def __init__(self, directory: Path) -> None:
        private = PrivateDirectory(directory)
        self._channel: SealedChannel[Any] = SealedChannel(private.key(), SessionEnd.CLIENT, FromSupervisor)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWERS_WITHIN)
        self._sending = threading.Lock()
        self._unread: list[ReceivedMessage[Any]] = []
        try:
            self._socket.connect(str(private.socket))
            self._socket.sendall(self._channel.greeting())
            while not self._channel.established:
                self._unread += self._channel.feed(self._read())
        except (OSError, TimeoutError) as error:
            self._socket.close()
            raise SupervisorGone(f"no supervisor answers at {private.socket}: {error}") from error
        self._socket.settimeout(None)  # receiving ends when the supervisor does
        seconds = struct.pack("ll", int(ANSWERS_WITHIN), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)  # sending ends in any case

    def send(self, message: ControlMessage, epoch: int = 0, descriptors: tuple[int, ...] = ()) -> None:
        with self._sending:
            frame = self._channel.seal(message, epoch)
            try:
                if descriptors:
                    sent = socket.send_fds(self._socket, [frame], list(descriptors))
                    frame = frame[sent:]
                self._socket.sendall(frame)
            except OSError as error:
                raise SupervisorGone(f"the supervisor is gone: {error}") from error

    def receive(self) -> ReceivedMessage[Any]:
        """The next message. Raises :class:`SupervisorGone` when there will be none."""
        while not self._unread:
            self._unread += self._channel.feed(self._read())
        return self._unread.pop(0)

    def close(self) -> None:
        """End the session; a thread that is receiving gets :class:`SupervisorGone`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was down already
        self._socket.close()

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise SupervisorGone(f"the supervisor is gone: {error}") from error
        if not data:
            raise SupervisorGone("the supervisor has ended")
        return data


def ask_supervisor(directory: Path, question: AskStatus | AskOperation | AskEvidence) -> TellAnswer:
    """Ask a supervisor one thing."""
    client = Client(directory)
    try:
        client._socket.settimeout(ANSWERS_WITHIN)
        client.send(question)
        while True:
            message = client.receive().message
            if isinstance(message, TellAnswer):
                return message
    finally:
        client.close()
