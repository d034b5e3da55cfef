"""Memory on a GPU shared between processes by descriptor.

The allocation is reference-counted by the driver across processes, so that a survivor's mapping outlives the process
that made it (legacy CUDA IPC promises nothing of the kind).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eep.data_plane.memory import driver
from eep.errors import EepError, PeerUnreachable

if TYPE_CHECKING:
    import torch


class DeviceMemory:
    """At least ``size`` bytes at ``address`` on the current GPU, the same bytes in every process that holds ``fd``."""

    def __init__(self, fd: int, size: int, pieces: Sequence[tuple[int, int]], device: int) -> None:
        """Takes over ``fd`` and the handles. Use :meth:`create`, :meth:`adopt` or :meth:`placeholder`."""
        self._init(fd, size, device).put(0, pieces)

    def _init(self, fd: int, size: int, device: int) -> driver.Mapping:
        self.fd, self.size = fd, size
        mapping = driver.Mapping(driver.rounded(size, device), device)
        self._mapping: driver.Mapping | None = mapping
        self.address = mapping.address
        return mapping

    @classmethod
    def create(cls, label: str, size: int) -> DeviceMemory:
        """New memory, zeroed."""
        device = driver.current_device()
        handle, fd = driver.create_shared(device, driver.rounded(size, device))
        memory = cls(fd, size, [(handle, driver.rounded(size, device))], device)
        memory.bytes_at(0, size).zero_()
        driver.current_device()  # zeroed before any peer is told of it
        return memory

    @classmethod
    def adopt(cls, fd: int, size: int) -> DeviceMemory:
        """Memory whose descriptor a peer sent us. Takes over ``fd``."""
        try:
            device = driver.current_device()
            return cls(fd, size, [(driver.import_shared(fd), driver.rounded(size, device))], device)
        except EepError as error:
            os.close(fd)
            raise PeerUnreachable(f"a peer sent memory that this GPU cannot map: {error}") from error

    @classmethod
    def placeholder(cls, size: int) -> DeviceMemory:
        """The same small piece of memory again and again, over as many addresses as it takes."""
        device = driver.current_device()
        memory = cls.__new__(cls)
        mapping = memory._init(-1, size, device)
        driver.Filler(device).fill(mapping, 0, mapping.size)
        return memory

    def become(self, other: DeviceMemory) -> None:
        """Puts the memory of ``other`` behind these addresses, and takes over its descriptor."""
        if self._mapping is None or self.fd >= 0 or other.size != self.size:
            raise ValueError(f"memory of {other.size} bytes cannot take the place of a placeholder of {self.size}")
        driver.current_device()  # nothing runs on it any more
        self._mapping.put(0, [(driver.handle_at(other.address), self._mapping.size)])
        self.fd = os.dup(other.fd)
        other.close()

    def back(self, offset: int, size: int) -> None:
        """All of it has memory, always: it is one allocation, of which the driver takes no part back."""

    def give_up(self, offset: int, size: int) -> None:
        raise EepError("memory on a GPU is one allocation, and the driver takes no part of it back")

    def gain_of(self, offset: int, size: int) -> int:
        return 0

    def cost_of(self, offset: int, size: int) -> int:
        return 0

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """A tensor over part of the memory; it keeps the mapping alive."""
        if self._mapping is None:
            raise ValueError("this memory is closed")
        return self._mapping.shown(offset, size)

    def fabric_handle(self) -> bytes | None:
        """A handle by which another host of the same NVLink domain could map this memory, where the driver gives one.

        Not in use yet: ranks exchange descriptors, on one host. No such import has been run.
        """
        handle = driver.handle_at(self.address)
        try:
            return driver.fabric_handle(handle)
        finally:
            driver.release(handle)

    def close(self) -> None:
        """Lets go of the descriptor now, and of the mapping as soon as no tensor looks into it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._mapping = None
