"""Memory on a GPU of which parts can be given up, and had again.

The driver takes nothing back but whole allocations. So each part is one, with a descriptor of its own. At their addresses all
of them are one piece, like any other memory. A part that was given up has a small piece of memory behind its addresses, again
and again: what is written there is lost, and nothing fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from eep.data_plane.memory import driver
from eep.errors import EepError, PeerUnreachable

if TYPE_CHECKING:
    import torch

NONE = -1
"""In place of the descriptor of a part that has no memory."""


class Part(NamedTuple):
    start: int
    size: int
    is_loose: bool
    """Whether it can be given up."""

    @property
    def end(self) -> int:
        return self.start + self.size


def cut(size: int, loose: Sequence[tuple[int, int]], unit: int) -> tuple[Part, ...]:
    """Parts that follow each other, in whole units of the driver. Of the ranges (offsets and sizes) that are to be ``loose``,
    in order, those units are that lie inside. Where two touch, the unit between them belongs to the first."""
    parts: list[Part] = []
    at, whole = 0, -(-size // unit) * unit
    for run in _runs(loose):
        end = run[-1] // unit * unit
        for edge in run:
            until = min(-(-edge // unit) * unit, end)
            if until > at:
                parts.append(Part(at, until - at, edge != run[0]))
                at = until
    if at < whole:
        parts.append(Part(at, whole - at, False))
    return tuple(parts)


def _runs(loose: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The edges of ranges that touch each other: where each begins, and where the last one ends."""
    runs: list[list[int]] = []
    for offset, length in loose:
        if runs and runs[-1][-1] == offset:
            runs[-1].append(offset + length)
        else:
            runs.append([offset, offset + length])
    return runs


@dataclass(frozen=True)
class PartedKind:
    """The kind of such memory: the ranges that can be given up, and whether new memory has them ``backed`` from the
    beginning. Used like a class of memory (:class:`eep.data_plane.memory.Memory`), but for its many descriptors."""

    loose: tuple[tuple[int, int], ...]
    backed: bool = True

    def parts_of(self, size: int) -> tuple[Part, ...]:
        return cut(size, self.loose, driver.granularity_of(driver.current_device()))

    def create(self, label: str, size: int) -> PartedMemory:
        """New memory, zeroed."""
        memory = PartedMemory(self, size)
        memory.back_parts(number for number, part in enumerate(memory.parts) if self.backed or not part.is_loose)
        return memory.filled()

    def placeholder(self, size: int) -> PartedMemory:
        return PartedMemory(self, size).filled()

    def adopt_parts(self, descriptors: Sequence[int], size: int) -> PartedMemory:
        """Memory whose descriptors a peer sent us, ``NONE`` for parts that it has not. Takes over the descriptors."""
        left = list(descriptors)
        try:
            memory = PartedMemory(self, size)
            if len(left) != len(memory.parts):
                raise PeerUnreachable(f"a peer sent {len(left)} parts of memory where {len(memory.parts)} were due")
            for number, descriptor in enumerate(left):
                if descriptor != NONE:
                    memory.take(number, descriptor)
                    left[number] = NONE
            return memory.filled()
        except EepError as error:
            for descriptor in left:
                if descriptor != NONE:
                    os.close(descriptor)
            raise PeerUnreachable(f"a peer sent memory that this GPU cannot map: {error}") from error

    def adopt_lasting(self, descriptors: Sequence[int], size: int) -> PartedMemory:
        """The same, of what cannot be given up."""
        left = iter(descriptors)
        return self.adopt_parts([NONE if part.is_loose else next(left) for part in self.parts_of(size)], size)


class PartedMemory:
    """``size`` bytes at ``address``. Use :class:`PartedKind` to make one."""

    fd = NONE

    def __init__(self, kind: PartedKind, size: int) -> None:
        """Without any memory yet."""
        self.kind, self.size = kind, size
        self._device = driver.current_device()
        self.parts = kind.parts_of(size)
        self.descriptors = [NONE] * len(self.parts)
        self._mapping: driver.Mapping | None = driver.Mapping(self.parts[-1].end, self._device)
        self._filler = driver.Filler(self._device)
        self.address = self._mapping.address

    def filled(self) -> PartedMemory:
        """This memory, all of whose addresses can be used."""
        for number, descriptor in enumerate(self.descriptors):
            if descriptor == NONE:
                self._leave(number)
        return self

    def take(self, number: int, descriptor: int) -> None:
        """A part gets the memory behind a descriptor, which this takes over."""
        self._mapped().put(self.parts[number].start, [(driver.import_shared(descriptor), self.parts[number].size)])
        self.descriptors[number] = descriptor

    def back_parts(self, numbers: Iterable[int]) -> None:
        """New memory for these parts, zeroed. EepError if there is not so much; then none of them has any."""
        made: list[int] = []
        try:
            for number in numbers:
                part = self.parts[number]
                handle, descriptor = driver.create_shared(self._device, part.size)
                made.append(number)
                self.descriptors[number] = descriptor
                self._mapped().put(part.start, [(handle, part.size)])
                self.bytes_at(part.start, part.size).zero_()
        except EepError:
            for number in made:
                self._leave(number)
            raise
        driver.current_device()  # zeroed before any peer is told of it

    def back(self, offset: int, size: int) -> None:
        """Has memory behind these addresses. EepError if there is none."""
        missing = [number for number in self._loose_at(offset, size) if self.descriptors[number] == NONE]
        if missing:
            driver.current_device()  # nothing runs on it meanwhile
            self.back_parts(missing)

    def give_up(self, offset: int, size: int) -> None:
        """Lets go of the parts inside, in this process. Who else holds them is to let go, too."""
        numbers = [number for number in self._loose_inside(offset, size) if self.descriptors[number] != NONE]
        if numbers:
            driver.current_device()
            for number in numbers:
                self._leave(number)

    def gain_of(self, offset: int, size: int) -> int:
        """How many bytes there are to be had if this range is given up."""
        return sum(self.parts[number].size for number in self._loose_inside(offset, size))

    def cost_of(self, offset: int, size: int) -> int:
        """How many bytes it takes, at most, to have memory behind this range."""
        return sum(self.parts[number].size for number in self._loose_at(offset, size))

    def become(self, other: PartedMemory) -> None:
        """Puts the memory of ``other`` behind these addresses, and takes over its descriptors."""
        if any(each != NONE for each in self.descriptors) or other.parts != self.parts:
            raise ValueError(f"memory of {other.size} bytes cannot take the place of a placeholder of {self.size}")
        driver.current_device()  # nothing runs on it any more
        for number, descriptor in enumerate(other.descriptors):
            if descriptor != NONE:
                part = self.parts[number]
                self._mapped().put(part.start, [(driver.handle_at(other.address + part.start), part.size)])
                self.descriptors[number] = os.dup(descriptor)
        other.close()

    def lasting_descriptors(self) -> list[int]:
        """Those of the parts that cannot be given up."""
        return [each for each, part in zip(self.descriptors, self.parts, strict=True) if not part.is_loose]

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """A tensor over part of the memory; it keeps the mapping alive."""
        return self._mapped().shown(offset, size)

    def close(self) -> None:
        """Lets go of the descriptors now, and of the mapping as soon as no tensor looks into it any more."""
        for number in range(len(self.parts)):
            self._drop(number)
        self._mapping = None

    def _mapped(self) -> driver.Mapping:
        if self._mapping is None:
            raise ValueError("this memory is closed")
        return self._mapping

    def _loose_inside(self, offset: int, size: int) -> list[int]:
        return [
            number
            for number, part in enumerate(self.parts)
            if part.is_loose and part.start >= offset and part.end <= offset + size
        ]

    def _loose_at(self, offset: int, size: int) -> list[int]:
        return [
            number
            for number, part in enumerate(self.parts)
            if part.is_loose and part.start < offset + size and part.end > offset
        ]

    def _leave(self, number: int) -> None:
        part = self.parts[number]
        self._filler.fill(self._mapped(), part.start, part.size)
        self._drop(number)

    def _drop(self, number: int) -> None:
        if self.descriptors[number] != NONE:
            os.close(self.descriptors[number])
            self.descriptors[number] = NONE
