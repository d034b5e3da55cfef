"""Handing out memory: each rank answers on its Unix socket with the descriptors of its region and control page.

Messages are of fixed size and plain structure; nothing is parsed, nothing is dereferenced. A requester must be a process
of the same user. What does not fit is dropped and counted. Every wait has an end.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from eep.abi.collectives import OwnerState
from eep.abi.native import Shape
from eep.abi.peer_table import MAX_RANKS, ControlPage, ranks_of
from eep.data_plane.memory import Memory
from eep.data_plane.memory.shm import SharedMemory
from eep.data_plane.rendezvous import Claim, Rendezvous, socket_path
from eep.errors import EepError, PeerUnreachable
from eep.view import View

CONTROL_BYTES = 4096
_HELLO = b"EEP-HELLO-1\n"
_ANSWER = struct.Struct(f"<12sIIQQ{ctypes.sizeof(Shape)}s{MAX_RANKS}i")
_PATIENCE_S = 2.0  # for a peer that has connected and then says nothing
_PAUSE_S = 0.01  # until somebody is let in again after that has failed

assert ctypes.sizeof(ControlPage) <= CONTROL_BYTES


@dataclass(frozen=True, slots=True)
class Offer:
    """A peer's memory, mapped here, its process, and the view it had when it answered."""

    rank: int
    incarnation: int
    region: Memory
    control: Memory
    view: View
    process: int
    """A pidfd: readable once the peer is dead."""

    @property
    def state(self) -> OwnerState:
        """What the peer says of itself, now."""
        said = ControlPage.from_address(self.control.address).state
        return OwnerState(said) if said in tuple(OwnerState) else OwnerState.ALONE

    def close(self) -> None:
        self.region.close()
        self.control.close()
        os.close(self.process)


class Listener:
    """Answers peers in a thread of its own until closed."""

    def __init__(
        self,
        claim: Claim,
        shape: Shape,
        region: Memory,
        control: Memory,
        view: Callable[[], View],
    ) -> None:
        self.refused = 0
        self._closed = threading.Event()
        self._claim = claim
        self._shape = bytes(shape)
        self._memory = (region.fd, control.fd)
        self._view = view
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.bind(claim.socket_path)
        os.chmod(claim.socket_path, 0o600)  # nobody else could reach it before, either: the directory is private
        self._socket.listen(MAX_RANKS)
        self._thread = threading.Thread(target=self._serve, name=f"eep-listener-{claim.rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        # Shutting a listening socket down makes accept() fail at once in the other thread.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join(2 * _PATIENCE_S)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # There may be no descriptors left for a moment. Whoever waits is let in when there are some again.
                if self._closed.wait(_PAUSE_S):
                    return
                self.refused += 1
                continue
            with connection:
                connection.settimeout(_PATIENCE_S)
                try:
                    self._answer(connection)
                except (OSError, EepError):
                    self.refused += 1

    def _answer(self, connection: socket.socket) -> None:
        _, uid, _ = _credentials(connection)
        if uid != os.geteuid():
            raise PeerUnreachable(f"user {uid} asked for memory of user {os.geteuid()}")
        if _receive_exactly(connection, len(_HELLO)) != _HELLO:
            raise PeerUnreachable("somebody who does not speak this protocol asked for memory")
        view = self._view()
        padded = [*view.incarnations, *[-1] * (MAX_RANKS - view.max_ranks)]
        active = sum(1 << rank for rank in view.active)
        answer = _ANSWER.pack(
            _HELLO, self._claim.rank, self._claim.incarnation, view.epoch, active, self._shape, *padded
        )
        socket.send_fds(connection, [answer], self._memory)


def fetch(rendezvous: Rendezvous, rank: int, incarnation: int, shape: Shape, region: Memory) -> Offer:
    """Maps the memory of one incarnation of ``rank``, of the kind and size of ours, ``region``.

    Raises :class:`PeerUnreachable` if it cannot be had now.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(socket_path(rendezvous.path, rank, incarnation))
            pid, _, _ = _credentials(connection)
            process = os.pidfd_open(pid)
        except OSError as error:
            raise PeerUnreachable(f"rank {rank} (incarnation {incarnation}) does not answer: {error}") from error
        fds: list[int] = [process]
        try:
            # It answers after the pidfd was opened, so that it is the process behind it, and no later one of that number.
            connection.sendall(_HELLO)
            answer, received, _, _ = socket.recv_fds(connection, _ANSWER.size, 2)
            fds[:0] = received
            if len(answer) < _ANSWER.size:
                answer += _receive_exactly(connection, _ANSWER.size - len(answer))
            return _accept(answer, fds, rank, incarnation, shape, region)
        except OSError as error:
            raise PeerUnreachable(f"rank {rank} (incarnation {incarnation}) broke off: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)


def fetch_when_there(
    rendezvous: Rendezvous,
    rank: int,
    incarnation: int | None,
    shape: Shape,
    region: Memory,
    deadline: float,
) -> Offer:
    """As :func:`fetch`, waiting until ``deadline`` (of ``time.monotonic``) for the rank to appear."""
    while True:
        wanted = rendezvous.latest(rank) if incarnation is None else incarnation
        problem = f"rank {rank} is not there"
        if wanted is not None:
            try:
                return fetch(rendezvous, rank, wanted, shape, region)
            except PeerUnreachable as error:
                problem = str(error)
        if time.monotonic() >= deadline:
            raise PeerUnreachable(f"{problem}; waited for it in {rendezvous.path} until the timeout")
        time.sleep(0.002)


def _accept(answer: bytes, fds: list[int], rank: int, incarnation: int, shape: Shape, own: Memory) -> Offer:
    """Checks an answer before any of it is used. Takes over the descriptors it maps."""
    hello, their_rank, their_incarnation, epoch, active, their_shape, *incarnations = _ANSWER.unpack(answer)
    if hello != _HELLO or len(fds) != 3 or (their_rank, their_incarnation) != (rank, incarnation):
        raise PeerUnreachable(f"rank {rank} (incarnation {incarnation}) gave an answer that cannot be")
    if their_shape != bytes(shape):
        theirs = Shape.from_buffer_copy(their_shape)
        differ = [
            f"{name} is {getattr(theirs, name)} there and {getattr(shape, name)} here"
            for name in Shape.NAMES
            if getattr(theirs, name) != getattr(shape, name)
        ]
        raise ValueError(f"the buffer of rank {rank} was made differently: {'; '.join(differ)}")
    try:
        view = View(epoch, ranks_of(active), tuple(incarnations[: shape.max_ranks]))
    except ValueError as error:
        raise PeerUnreachable(f"rank {rank} told of a view that cannot be: {error}") from error
    region = type(own).adopt(fds.pop(0), own.size)
    try:
        control = SharedMemory.adopt(fds.pop(0), CONTROL_BYTES)
        return Offer(rank, incarnation, region, control, view, fds.pop(0))
    except BaseException:
        region.close()
        raise


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as the kernel knows them."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        if not (piece := connection.recv(size - len(received))):
            raise ConnectionError("the connection ended early")
        received += piece
    return received
