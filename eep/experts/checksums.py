"""What the bytes of every expert must be: one checksum for each, taken when the model was loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eep.errors import EepError
from eep.experts.layout import ExpertMemory
from eep.experts.placement.packing import EMPTY, BoolArray
from eep.experts.placement.slot_plan import Placement


@dataclass(frozen=True, eq=False)
class Checksums:
    """``values[layer, expert]``, where ``known``."""

    values: npt.NDArray[np.uint64]
    known: BoolArray

    @classmethod
    def none(cls, layers: int, experts: int) -> Checksums:
        return cls(np.zeros((layers, experts), dtype=np.uint64), np.zeros((layers, experts), dtype=bool))

    @classmethod
    def of_rank(cls, memory: ExpertMemory, placement: Placement, rank: int) -> Checksums:
        """The checksums of the experts that ``placement`` gives to ``rank``."""
        sums = cls.none(placement.layers, placement.experts)
        size = placement.slots_per_rank
        held = placement.physical_to_logical[:, rank * size : (rank + 1) * size]
        for layer, slot in np.argwhere(held != EMPTY).tolist():
            sums.values[layer, held[layer, slot]] = memory.checksum(layer, slot)
            sums.known[layer, held[layer, slot]] = True
        return sums

    @classmethod
    def merged(cls, parts: Iterable[Checksums]) -> Checksums:
        """All of them together. Raises where two disagree: then some rank has loaded the wrong bytes."""
        parts = list(parts)
        result = cls.none(*parts[0].values.shape)
        for part in parts:
            clash = part.known & result.known & (part.values != result.values)
            if clash.any():
                layer, expert = np.argwhere(clash)[0].tolist()
                raise EepError(
                    f"two copies of expert {expert} in layer {layer} differ ({int(clash.sum())} such "
                    "experts): load the model again before serving with it"
                )
            result.values[part.known] = part.values[part.known]
            result.known[part.known] = True
        return result

    def matches(self, layer: int, expert: int, value: int) -> bool:
        return bool(self.known[layer, expert]) and int(self.values[layer, expert]) == value
