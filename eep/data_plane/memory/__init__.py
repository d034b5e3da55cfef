"""Symmetric memory: one region per rank, mapped by its peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self, cast

if TYPE_CHECKING:
    import torch


class MemoryKind(Protocol):
    """A class of memory, or what makes memory in its place."""

    def create(self, label: str, size: int) -> Memory:
        """New memory, zeroed."""
        ...

    def placeholder(self, size: int) -> Memory:
        """Addresses that can be used, with hardly any memory behind them: what is written there may be read elsewhere, or
        be lost. It has no descriptor until :meth:`Memory.become`."""
        ...


class PlainKind(MemoryKind, Protocol):
    """Of memory with one descriptor."""

    def adopt(self, fd: int, size: int) -> Memory:
        """Memory whose descriptor a peer sent us. Takes over ``fd``."""
        ...


class Memory(Protocol):
    """Memory shared by descriptor: a memfd on a CPU (``shm``); on a GPU an allocation (``vmm``), or many (``parted``)."""

    fd: int
    size: int
    address: int

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

    def gain_of(self, offset: int, size: int) -> int:
        """How many bytes there are to be had if this range is given up."""
        ...

    def cost_of(self, offset: int, size: int) -> int:
        """How many bytes it takes, at most, to have memory behind this range."""
        ...

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """A tensor over part of the memory, with a storage of its own; it keeps the mapping alive."""
        ...

    def close(self) -> None:
        """Lets go of the descriptor now, and of the mapping as soon as no tensor looks into it any more."""
        ...


def memory_of(device_type: str) -> PlainKind:
    """The kind of memory in which ranks on such a device meet."""
    if device_type == "cuda":
        from eep.data_plane.memory.vmm import DeviceMemory

        return DeviceMemory
    from eep.data_plane.memory.shm import SharedMemory

    return SharedMemory


def memory_with(device_type: str, loose: Sequence[tuple[int, int]], *, backed: bool) -> MemoryKind:
    """The kind of memory of which these ranges (offsets and sizes) can be given up, and had again. ``backed``: whether they
    have memory from the beginning, where that makes a difference."""
    if device_type == "cuda" and loose:
        from eep.data_plane.memory.parted import PartedKind

        return PartedKind(tuple(loose), backed)
    return memory_of(device_type)


def kind_of(memory: Memory) -> MemoryKind:
    """More memory of the kind of this one can be had from it."""
    kind: MemoryKind | None = getattr(memory, "kind", None)
    return cast("MemoryKind", type(memory)) if kind is None else kind


def descriptors_of(memory: Memory) -> list[int]:
    """What a peer needs to map it (:func:`adopt`). What can be given up of it is not among them."""
    from eep.data_plane.memory.parted import PartedMemory

    return memory.lasting_descriptors() if isinstance(memory, PartedMemory) else [memory.fd]


def count_descriptors(kind: MemoryKind, size: int) -> int:
    """How many a peer needs to map memory of this kind."""
    from eep.data_plane.memory.parted import PartedKind

    return sum(not part.is_loose for part in kind.parts_of(size)) if isinstance(kind, PartedKind) else 1


def adopt(kind: MemoryKind, descriptors: Sequence[int], size: int) -> Memory:
    """Memory whose :func:`descriptors_of` a peer sent us, as many as were due. Takes them over. PeerUnreachable if it cannot
    be mapped."""
    from eep.data_plane.memory.parted import PartedKind

    if isinstance(kind, PartedKind):
        return kind.adopt_lasting(descriptors, size)
    (descriptor,) = descriptors
    return cast(PlainKind, kind).adopt(descriptor, size)
