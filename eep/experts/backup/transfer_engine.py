"""Mooncake's transfer engine, as backup uses it: expose memory for reading, read the memory of peers.

Over TCP the engine lets any process that can reach its port read and write the memory it was given. So it is
given read-only mappings only: a stranger's write fails in the kernel. And reads land in scratch memory first: a
peer that answers after the timeout writes there, never into a slot that another source has filled meanwhile.

The engine has deadlines of its own, and not for everything: it waits a minute for a peer that takes a connection and says
nothing. So each read has a thread, which may end when it likes.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
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
from eep.experts.backup import port_filter
from eep.experts.backup.transport import TransferFailed

_DISTRIBUTIONS = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
)
_OLDEST = (0, 3, 13)  # before, any peer could read and write outside of registered memory (CVE-2026-103764)

_MOST_ABANDONED_BYTES = 512 << 20
_READ_WITHIN_S = 15.0
"""More than the engine takes by itself for a peer that was reached once."""

logger = logging.getLogger(__name__)


class Engine:
    """A :class:`Transport` over one transfer engine, reachable for peers at ``address``."""

    def __init__(
        self, address: str = "127.0.0.1", protocol: str = "tcp", device: str = "", read_within: float = _READ_WITHIN_S
    ) -> None:
        """``read_within``: how many seconds a read may take."""
        if address in ("", "0.0.0.0", "::", "*"):
            raise ValueError(f"name the address of one interface for peers to reach, not {address!r}")
        if ":" in address:  # of IPv6; Mooncake looks when a process loads it
            os.environ.setdefault("MC_USE_IPV6", "1")
        engine, before = _engine_class()(), port_filter.open_sockets()
        if engine.initialize(address, "P2PHANDSHAKE", protocol, device):
            raise EepError(f"Mooncake could not start on {address} with {protocol}; name an address of this host")
        try:
            port_filter.filter_new_listeners(before, address)
        except (OSError, ValueError) as error:  # a name, or a kernel without filters
            logger.warning("Mooncake listens on all interfaces of this host, and not on %s alone: %s", address, error)
        self.session = f"{address}:{engine.get_rpc_port()}"
        self._engine = engine
        self._tcp, self._read_within = protocol == "tcp", read_within
        self._lock = threading.Lock()
        self._exposed: dict[int, mmap.mmap] = {}
        self._scratch: list[torch.Tensor] = []
        self._late: dict[str, threading.Thread] = {}
        """Reads that were given up, and have not ended, by session."""
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
        result = self._transfer(session, local, [address for address, _ in parts], sizes)
        if result:
            with self._lock:
                self._abandoned.append(scratch)
            raise TransferFailed(f"{session} did not deliver {sum(sizes)} bytes (Mooncake says {result})")
        for (_, target), start, size in zip(parts, starts, sizes, strict=True):
            target.copy_(scratch[start : start + size])
        with self._lock:
            self._scratch.append(scratch)

    def _transfer(self, session: str, local: list[int], remote: list[int], sizes: list[int]) -> int | str:
        """What went wrong; nothing if all is there."""
        with self._lock:
            self._late = {each: thread for each, thread in self._late.items() if thread.is_alive()}
            if session in self._late:
                return "an earlier read has not ended"
        result: list[int | str] = []
        thread = threading.Thread(
            target=lambda: result.append(self._engine.batch_transfer_sync_read(session, local, remote, sizes)),
            name="eep-read",
            daemon=True,
        )
        thread.start()
        thread.join(self._read_within)
        if not result:
            with self._lock:
                self._late[session] = thread
            return f"no answer within {self._read_within:.0f} s"
        return result[0]

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
        scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
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
