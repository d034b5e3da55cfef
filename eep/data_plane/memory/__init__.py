"""Symmetric memory: one region per rank, mapped by its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    import torch


class Memory(Protocol):
    """Memory shared by descriptor: a memfd on a CPU (``shm``), a driver allocation on a GPU (``vmm``)."""

    fd: int
    size: int
    address: int

    @classmethod
    def create(cls, label: str, size: int) -> Memory:
        """New memory, zeroed."""
        ...

    @classmethod
    def adopt(cls, fd: int, size: int) -> Memory:
        """Memory whose descriptor a peer sent us. Takes over ``fd``."""
        ...

    @classmethod
    def placeholder(cls, size: int) -> Memory:
        """Addresses that can be used, with hardly any memory behind them: what is written there may be read elsewhere, or
        be lost. It has no descriptor until :meth:`become`."""
        ...

    def become(self, other: Self) -> None:
        """Puts the memory of ``other`` behind the addresses of this placeholder, and takes over its descriptor. Every
        tensor over the placeholder shows ``other`` from now on. Nothing may run on it meanwhile."""
        ...

    def back(self, offset: int, size: int) -> None:
        """Has memory behind these addresses, if they were given up. Raises OSError or :class:`eep.EepError` if there is
        none."""
        ...

    def give_up(self, offset: int, size: int) -> None:
        """Lets go of the memory behind these addresses, as far as it goes in whole pages, in every process that has it
        mapped. What was there is lost; the addresses stay."""
        ...

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """A tensor over part of the memory, with a storage of its own; it keeps the mapping alive."""
        ...

    def close(self) -> None:
        """Lets go of the descriptor now, and of the mapping as soon as no tensor looks into it any more."""
        ...


def memory_of(device_type: str) -> type[Memory]:
    """The kind of memory in which ranks on such a device meet."""
    if device_type == "cuda":
        from eep.data_plane.memory.vmm import DeviceMemory

        return DeviceMemory
    from eep.data_plane.memory.shm import SharedMemory

    return SharedMemory
