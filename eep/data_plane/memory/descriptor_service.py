"""Memory handed to a peer by descriptor, over a Unix socket in a private directory.

    peer                              owner
     |  connect; check the owner's user |
     |  open a pidfd of the owner       |
     |  hello  ------------------------>|  check the peer's user and the hello
     |<------------ answer, descriptors |
     |  check both; map                 |

Hello and answer have fixed sizes, and the caller checks the answer before it uses it. A request that does not fit is dropped
and counted. Each side gives the other two seconds for the whole of it.
"""

from __future__ import annotations

import array
import contextlib
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eep.abi.peer_table import MAX_RANKS
from eep.access import check_socket_path, peer_credentials
from eep.errors import EepError, PeerUnreachable

_PATIENCE_S = 2.0  # for all that one peer says
_PAUSE_S = 0.01  # before the next accept, after one has failed


@dataclass(frozen=True, slots=True)
class DescriptorProtocol:
    """What two processes must agree on: the ``hello`` of a request, and the size and descriptors of the answer."""

    hello: bytes
    answer_bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class DescriptorAnswer:
    """What a peer answered. The receiver owns the descriptors, the pidfd ``process`` among them."""

    content: bytes
    descriptors: tuple[int, ...]
    process: int
    """Readable once the process that answered is gone."""

    def close(self) -> None:
        for descriptor in (*self.descriptors, self.process):
            os.close(descriptor)


class DescriptorServer:
    """Answers peers in a thread of its own until closed. ``answer`` makes the content anew for each of them."""

    def __init__(
        self,
        path: str,
        protocol: DescriptorProtocol,
        descriptors: Sequence[int],
        answer: Callable[[], bytes],
    ) -> None:
        if len(descriptors) != protocol.descriptors:
            raise ValueError(f"{len(descriptors)} descriptors were given, the protocol has {protocol.descriptors}")
        self.refused = 0
        """Requests that got no answer."""
        self._path, self._protocol, self._descriptors, self._answer = path, protocol, tuple(descriptors), answer
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        os.fchmod(self._socket.fileno(), 0o600)  # before it has a name
        self._socket.bind(check_socket_path(path))
        self._socket.listen(MAX_RANKS)
        name = f"eep-{pathlib.Path(path).stem}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        # Shutting a listening socket down makes accept() fail at once in the other thread.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _PATIENCE_S)
        self._socket.close()
        with contextlib.suppress(OSError):  # it is gone, or the disk is read-only
            os.unlink(self._path)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # There may be no descriptors left for a moment. The peer that waits is let in when there are some again.
                if self._closed.wait(_PAUSE_S):
                    return
                self.refused += 1
                continue
            with connection:
                try:
                    self._serve_peer(connection)
                except (OSError, EepError):
                    self.refused += 1

    def _serve_peer(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        peer = peer_credentials(connection)
        if not peer.is_same_user:
            raise PeerUnreachable(f"user {peer.uid} asked for memory of user {os.geteuid()}")
        if _receive_exactly(connection, len(self._protocol.hello), deadline) != self._protocol.hello:
            raise PeerUnreachable("a process that does not speak this protocol asked for memory")
        content = self._answer()
        connection.settimeout(_left(deadline))
        # A socket buffer that has just been made has room for all of it.
        socket.send_fds(connection, [content], self._descriptors)


def ask_for_descriptors(path: str, protocol: DescriptorProtocol, peer: str) -> DescriptorAnswer:
    """Asks the server at ``path``. Raises :class:`PeerUnreachable`, with the words ``peer``, if it gives no answer now."""
    deadline = time.monotonic() + _PATIENCE_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(_left(deadline))
        try:
            connection.connect(path)
            owner = peer_credentials(connection)
            if not owner.is_same_user:
                raise PeerUnreachable(f"{peer}: the socket belongs to another user, {owner.uid}")
            process = os.pidfd_open(owner.pid)
        except OSError as error:
            raise PeerUnreachable(f"{peer} does not answer: {error}") from error
        received: list[int] = []
        try:
            # It answers after the pidfd was opened, so that it is the process behind it, and no later one of that number.
            connection.sendall(protocol.hello)
            content, complete = _receive_with_descriptors(connection, protocol, received, deadline)
            content += _receive_exactly(connection, protocol.answer_bytes - len(content), deadline)
            if not complete or len(received) != protocol.descriptors:
                raise PeerUnreachable(f"{peer} sent {len(received)} descriptors where {protocol.descriptors} were due")
            return DescriptorAnswer(content, tuple(received), process)
        except BaseException as error:
            for descriptor in (*received, process):
                os.close(descriptor)
            if isinstance(error, OSError):
                raise PeerUnreachable(f"{peer} broke off: {error}") from error
            raise


def _receive_with_descriptors(
    connection: socket.socket, protocol: DescriptorProtocol, received: list[int], deadline: float
) -> tuple[bytes, bool]:
    """The first bytes of an answer, and whether all descriptors that came with them are among ``received``.

    Not ``socket.recv_fds``, which does not pass its flags on: a child process would inherit the descriptors.
    """
    connection.settimeout(_left(deadline))
    numbers = array.array("i")
    room = socket.CMSG_LEN(protocol.descriptors * numbers.itemsize)
    content, ancillary, flags, _ = connection.recvmsg(protocol.answer_bytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    received.extend(numbers)
    return content, not flags & socket.MSG_CTRUNC


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(_left(deadline))
        if not (piece := connection.recv(size - len(received))):
            raise ConnectionError("the connection ended early")
        received += piece
    return received


def _left(deadline: float) -> float:
    """The seconds until ``deadline``. Raises when none are left: to a socket, 0 means not to wait at all."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError(f"it took longer than {_PATIENCE_S} seconds")
    return left
