"""The memory of other ranks, as repair reads it: the one module that knows where a region comes from.

A rank hands the descriptor of its region (a sealed memfd on a CPU, a driver allocation on a GPU, see
``eep.data_plane.memory``) to processes of the same user, over a Unix socket in the private directory of the instance.
Everything else copies between tensors, with :func:`copy_all`, and does not care what kind of memory they show.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from eep.abi import native
from eep.data_plane.memory import Memory, memory_of
from eep.errors import PeerUnreachable
from eep.view import View

_HELLO = b"EEP-EXPERTS-1\n"
_PATIENCE_S = 2.0  # for a peer that has connected and then says nothing
_PAUSE_S = 0.01  # until somebody is let in again after that has failed
_CREDENTIALS = struct.Struct("3i")


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each of ``sources``, bytes in one piece, to its target. On a GPU all at once, in the order of the stream."""
    pairs = list(zip(targets, sources, strict=True))
    for target, source in pairs:
        if target.numel() != source.numel() or target.dtype != torch.uint8 or source.dtype != torch.uint8:
            raise ValueError(
                f"{source.numel()} of {source.dtype} cannot be copied to {target.numel()} of {target.dtype}"
            )
    devices = {tensor.device for pair in pairs for tensor in pair}
    if len(devices) != 1 or not all(tensor.is_contiguous() for pair in pairs for tensor in pair):
        for target, source in pairs:
            target.copy_(source)
        return
    device = devices.pop()
    library = native.load(device.type)
    to, from_ = ((ctypes.c_void_p * len(pairs))(*(pair[side].data_ptr() for pair in pairs)) for side in (0, 1))
    sizes = (ctypes.c_uint64 * len(pairs))(*(target.numel() for target, _ in pairs))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else None
        native.check(library, library.eep_copy_batch(len(pairs), to, from_, sizes, stream))


class PeerMemory(Protocol):
    """The expert regions of the other ranks of one view."""

    def alive(self, rank: int) -> bool:
        """Whether the process behind the region still runs; False once it is known to be gone."""

    def region(self, rank: int) -> torch.Tensor:
        """The bytes of that rank, mapped here. Raises :class:`PeerUnreachable` if they cannot be had."""


def socket_path(directory: pathlib.Path, rank: int, incarnation: int) -> str:
    return str(directory / f"experts-r{rank}.i{incarnation}.sock")


class RegionServer:
    """Hands the descriptor of this rank's expert region to peers, in a thread of its own, until closed."""

    def __init__(self, directory: pathlib.Path, rank: int, incarnation: int, memory: Memory) -> None:
        self.refused = 0
        self._closed = threading.Event()
        self._memory = memory
        self._path = socket_path(directory, rank, incarnation)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.bind(self._path)
        os.chmod(self._path, 0o600)
        self._socket.listen(64)
        self._thread = threading.Thread(target=self._serve, name=f"eep-experts-{rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        # Shutting a listening socket down makes accept() fail at once in the other thread.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _PATIENCE_S)
        self._socket.close()
        pathlib.Path(self._path).unlink(missing_ok=True)

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
                    if _user_of(connection) != os.geteuid() or connection.recv(len(_HELLO)) != _HELLO:
                        raise PeerUnreachable("a stranger asked for expert memory")
                    socket.send_fds(connection, [_HELLO], [self._memory.fd])
                except (OSError, PeerUnreachable):
                    self.refused += 1


class MappedPeers:
    """:class:`PeerMemory` over shared memory, for the ranks of ``view`` on this host, mapped when asked."""

    def __init__(self, directory: pathlib.Path, view: View, region_bytes: int, device: str = "cpu") -> None:
        self._directory = directory
        self._view = view
        self._region_bytes = region_bytes
        self._device = device
        self._lock = threading.Lock()
        self._mapped: dict[int, tuple[Memory, int]] = {}

    def alive(self, rank: int) -> bool:
        try:
            _, process = self._map(rank)
        except PeerUnreachable:
            return False
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return not poll.poll(0)

    def region(self, rank: int) -> torch.Tensor:
        memory, _ = self._map(rank)
        return memory.bytes_at(0, memory.size)

    def close(self) -> None:
        with self._lock:
            for memory, process in self._mapped.values():
                memory.close()
                os.close(process)
            self._mapped.clear()

    def _map(self, rank: int) -> tuple[Memory, int]:
        with self._lock:
            if rank not in self._mapped:
                if rank not in self._view.active:
                    raise PeerUnreachable(f"rank {rank} is not part of epoch {self._view.epoch}")
                path = socket_path(self._directory, rank, self._view.incarnations[rank])
                self._mapped[rank] = _fetch(path, rank, self._region_bytes, self._device)
            return self._mapped[rank]


def _fetch(path: str, rank: int, region_bytes: int, device: str) -> tuple[Memory, int]:
    """The region behind a socket, and a descriptor that becomes readable when its process ends."""
    descriptors: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(path)
            if _user_of(connection) != os.geteuid():
                raise PeerUnreachable(f"the socket of rank {rank} belongs to another user")
            process = os.pidfd_open(_process_of(connection))
        except OSError as error:
            raise PeerUnreachable(f"rank {rank} does not offer its experts: {error}") from error
        try:
            connection.sendall(_HELLO)
            answer, descriptors, _, _ = socket.recv_fds(connection, len(_HELLO), 1)
            if answer != _HELLO or len(descriptors) != 1:
                raise PeerUnreachable(f"rank {rank} gave an answer that cannot be")
            return memory_of(device).adopt(descriptors.pop(), region_bytes), process
        except BaseException as error:
            os.close(process)
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, OSError):
                raise PeerUnreachable(f"rank {rank} broke off: {error}") from error
            raise


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    return _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))


def _process_of(connection: socket.socket) -> int:
    return _credentials(connection)[0]


def _user_of(connection: socket.socket) -> int:
    return _credentials(connection)[1]
