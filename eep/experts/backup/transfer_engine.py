"""Mooncake's transfer engine, as backup uses it: expose memory for reading, read the memory of peers.

Over TCP the engine lets any process that can reach its port read and write the memory it was given. So it is
given read-only mappings only: a stranger's write fails in the kernel. And reads land in scratch memory first: a
peer that answers after the timeout writes there, never into a slot that another source has filled meanwhile.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError
from eep.experts.backup.transport import TransferFailed

_DISTRIBUTIONS = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
)
_OLDEST = (0, 3, 13)  # before, any peer could read and write outside of registered memory (CVE-2026-103764)

_MOST_ABANDONED_BYTES = 512 << 20


class Engine:
    """A :class:`Transport` over one transfer engine, reachable for peers at ``address``."""

    def __init__(self, address: str = "127.0.0.1", protocol: str = "tcp", device: str = "") -> None:
        if address in ("", "0.0.0.0", "::", "*"):
            raise ValueError(f"name the address of one interface for peers to reach, not {address!r}")
        engine = _engine_class()()
        if engine.initialize(address, "P2PHANDSHAKE", protocol, device):
            raise EepError(f"Mooncake could not start on {address} with {protocol}; name an address of this host")
        self.session = f"{address}:{engine.get_rpc_port()}"
        self._engine = engine
        self._tcp = protocol == "tcp"
        self._lock = threading.Lock()
        self._exposed: dict[int, mmap.mmap] = {}
        self._scratch: list[torch.Tensor] = []
        # Memory that a late answer could still be written to. It must never be freed.
        self._abandoned: deque[torch.Tensor] = deque()

    def expose(self, memory: SharedMemory) -> int:
        """Let peers read ``memory``; the address at which they do."""
        # A NIC registers only what it could write to; there, peers need a key that the engine hands out.
        access = mmap.PROT_READ if self._tcp else mmap.PROT_READ | mmap.PROT_WRITE
        mapping = mmap.mmap(memory.fd, memory.size, mmap.MAP_SHARED, access)
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        with self._lock:
            if self._engine.register_memory(address, memory.size):
                raise EepError(f"Mooncake could not register {memory.size} bytes; see its log")
            self._exposed[address] = mapping
        return address

    def withdraw(self, address: int) -> None:
        """Take back what :meth:`expose` gave out."""
        with self._lock:
            if address in self._exposed:
                self._engine.unregister_memory(address)
                del self._exposed[address]

    def read(self, session: str, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Fill each tensor from the address beside it at ``session``, or raise :class:`TransferFailed`."""
        sizes = [target.numel() for _, target in parts]
        scratch = self._take(sum(sizes))
        starts = list(itertools.accumulate(sizes, initial=0))[:-1]
        local = [scratch.data_ptr() + start for start in starts]
        result = self._engine.batch_transfer_sync_read(session, local, [address for address, _ in parts], sizes)
        if result:
            with self._lock:
                self._abandoned.append(scratch)
            raise TransferFailed(f"{session} did not deliver {sum(sizes)} bytes (Mooncake says {result})")
        for (_, target), start, size in zip(parts, starts, sizes, strict=True):
            target.copy_(scratch[start : start + size])
        with self._lock:
            self._scratch.append(scratch)

    def _take(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            for index, scratch in enumerate(self._scratch):
                if scratch.numel() >= nbytes:
                    return self._scratch.pop(index)
            if sum(scratch.numel() for scratch in self._abandoned) > _MOST_ABANDONED_BYTES:
                # The oldest has waited longest. Should its answer still come, a checksum will not match.
                for _ in range(len(self._abandoned)):
                    if self._abandoned[0].numel() >= nbytes:
                        return self._abandoned.popleft()
                    self._abandoned.rotate(-1)
            while self._scratch and not self._tcp:
                self._engine.unregister_memory(self._scratch.pop().data_ptr())
            self._scratch.clear()
        scratch = torch.empty(nbytes, dtype=torch.uint8)
        if not self._tcp and self._engine.register_memory(scratch.data_ptr(), nbytes):
            raise EepError(f"Mooncake could not register {nbytes} bytes to read into; see its log")
        return scratch


def require_mooncake() -> None:
    """Raises :class:`EepError`, which says what to install, if there is no safe transfer engine here."""
    _engine_class()


def _engine_class() -> Any:
    """The transfer engine, of a version without known holes."""
    versions = []
    for name in _DISTRIBUTIONS:
        try:
            versions.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    if not versions:
        raise EepError("the backup service needs Mooncake: pip install 'eep[backup]' (and Debian's libibverbs1)")
    for version in versions:
        if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _OLDEST:
            oldest = ".".join(map(str, _OLDEST))
            raise EepError(
                f"Mooncake {version} lets any peer write outside of registered memory; install {oldest} or newer"
            )
    # A peer that has stopped must not hold a repair up for longer than a read from the next source takes.
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", "10")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise EepError(f"Mooncake does not load ({error}); on Debian, install libibverbs1") from error
    return TransferEngine
