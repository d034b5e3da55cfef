"""The memory of peers, as repair reads it: the one module that knows where a region comes from.

A rank hands the descriptor of its region to its peers with ``descriptor_service``: a sealed memfd on a CPU, a driver
allocation on a GPU. All other code copies between tensors with :func:`copy_all`, whatever memory they show.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import select
import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from eep.abi import native
from eep.data_plane.memory import Memory, MemoryKind, adopt, count_descriptors, descriptors_of
from eep.data_plane.memory.descriptor_service import DescriptorProtocol, DescriptorServer, ask_for_descriptors
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import PeerUnreachable
from eep.view import View

_HELLO = b"EEP-EXPERTS-1\n"


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
        """The bytes of that rank, mapped here. Raises :class:`PeerUnreachable` if the rank does not hand them out."""


def region_socket(directory: pathlib.Path, rank: int, incarnation: int) -> str:
    return str(directory / f"experts-r{rank}.i{incarnation}.sock")


def serve_region(directory: pathlib.Path, rank: int, incarnation: int, memory: Memory) -> DescriptorServer:
    """Hands the descriptor of this rank's expert region to its peers, until closed.

    Removes the sockets that earlier incarnations of this rank have left: one that is killed cannot do so itself.
    """
    for left in directory.glob(f"experts-r{rank}.i*.sock"):
        left.unlink(missing_ok=True)
    descriptors = descriptors_of(memory)
    path = region_socket(directory, rank, incarnation)
    return DescriptorServer(path, _protocol(len(descriptors)), descriptors, lambda: _HELLO)


def _protocol(descriptors: int) -> DescriptorProtocol:
    return DescriptorProtocol(_HELLO, len(_HELLO), descriptors)


class MappedPeers:
    """:class:`PeerMemory` over shared memory, for the ranks of ``view`` on this host, mapped when asked."""

    def __init__(self, directory: pathlib.Path, view: View, region_bytes: int, kind: MemoryKind = SharedMemory) -> None:
        self._directory = directory
        self._view = view
        self._region_bytes = region_bytes
        self._kind = kind
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
                path = region_socket(self._directory, rank, self._view.incarnations[rank])
                self._mapped[rank] = _fetch_region(path, rank, self._region_bytes, self._kind)
            return self._mapped[rank]


def _fetch_region(path: str, rank: int, region_bytes: int, kind: MemoryKind) -> tuple[Memory, int]:
    """The region behind a socket, and a pidfd of the process that it belongs to."""
    protocol = _protocol(count_descriptors(kind, region_bytes))
    answer = ask_for_descriptors(path, protocol, f"rank {rank}, asked for its experts,")
    if answer.content != _HELLO:
        answer.close()
        raise PeerUnreachable(f"rank {rank} answered in another protocol when it was asked for its experts")
    try:
        return adopt(kind, answer.descriptors, region_bytes), answer.process  # which closes what it does not take over
    except BaseException:
        os.close(answer.process)
        raise
