"""Which expert each slot of a rank holds, written down where the next life of the rank finds it.

The rank changes a line before it writes into the slot and after it has verified what it wrote. If it is killed in between,
the line says that the slot holds nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertMemory
from eep.experts.placement.packing import EMPTY, IntArray


def index_bytes(layers: int, slots: int) -> int:
    return 16 * layers * slots


class SlotIndex:
    """``memory`` has :func:`index_bytes` bytes."""

    def __init__(self, memory: npt.NDArray[np.uint8], layers: int, slots: int) -> None:
        half = 8 * layers * slots
        self._experts = memory[:half].view(np.int64).reshape(layers, slots)
        self._sums = memory[half : 2 * half].view(np.uint64).reshape(layers, slots)

    def clear(self) -> None:
        """Every slot holds nothing."""
        self._experts[:] = EMPTY

    @property
    def is_clear(self) -> bool:
        return bool((self._experts == EMPTY).all())

    def note(self, held: IntArray, checksums: Checksums) -> None:
        """``held[layer, slot]``, or ``EMPTY``."""
        self._experts[self._experts != held] = EMPTY
        # A slot has its checksum before it has its expert: a line that is torn holds nothing.
        self._sums[:] = np.take_along_axis(checksums.values, np.maximum(held, 0), axis=1)
        self._experts[:] = held

    def read(self, experts: int, slots: int | None = None) -> tuple[IntArray, Checksums]:
        """What the slots hold, and the checksums of these experts, as they were noted. Only so many ``slots`` still hold what
        they held; None: all."""
        held = self._noted(experts, slots)
        sums = Checksums.none(held.shape[0], experts)
        for layer, slot in np.argwhere(held != EMPTY).tolist():
            sums.values[layer, held[layer, slot]] = self._sums[layer, slot]
            sums.known[layer, held[layer, slot]] = True
        return held, sums

    def verify(self, memory: ExpertMemory, experts: int, slots: int | None = None) -> tuple[IntArray, Checksums]:
        """The same, where a slot whose bytes are not those that were noted holds nothing."""
        held = self._noted(experts, slots)
        sums = Checksums.none(held.shape[0], experts)
        for layer, slot in np.argwhere(held != EMPTY).tolist():
            if memory.checksum(layer, slot) == int(self._sums[layer, slot]):
                sums.values[layer, held[layer, slot]] = self._sums[layer, slot]
                sums.known[layer, held[layer, slot]] = True
            else:
                held[layer, slot] = EMPTY
        return held, sums

    def _noted(self, experts: int, slots: int | None) -> IntArray:
        held: IntArray = self._experts.copy()
        held[(held < 0) | (held >= experts)] = EMPTY
        held[:, held.shape[1] if slots is None else slots :] = EMPTY
        return held
