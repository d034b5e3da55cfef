"""What each rank holds of the placement of a view, as far as it has arrived, and what of that placement can be served by now.

With ``mask_after`` a view begins before all of its experts are there. Ranks say in the registry what they hold at that time,
with the number of the epoch, and each waits until all have said it. So all serve the same part of the placement.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping

import numpy as np

from eep.experts.placement.packing import EMPTY, BoolArray
from eep.experts.placement.slot_plan import Placement
from eep.experts.registry.directory_registry import Registry
from eep.view import View

_PREFIX = "arrived/"
_NO_EPOCH = -1
_EPOCH = struct.Struct("<q")
_PAUSE_S = 0.005


def pack(held: BoolArray) -> bytes:
    """``held[layer, slot]`` of one rank, a bit for each."""
    return np.packbits(held).tobytes()


def packed_bytes(layers: int, slots_per_rank: int) -> int:
    return -(-layers * slots_per_rank // 8)


def part_of(after: Placement, held: Mapping[int, bytes]) -> Placement:
    """``after`` without the slots that their ranks do not hold yet; ``after`` itself if there are none. ``held``: what each
    rank has said."""
    table = np.full_like(after.physical_to_logical, EMPTY)
    size = after.slots_per_rank
    for rank, said in held.items():
        columns = slice(rank * size, (rank + 1) * size)
        bits = np.unpackbits(np.frombuffer(said, dtype=np.uint8), count=after.layers * size).astype(bool)
        table[:, columns] = np.where(bits.reshape(after.layers, size), after.physical_to_logical[:, columns], EMPTY)
    return after if np.array_equal(table, after.physical_to_logical) else Placement(table, after.experts, size)


class Arrivals:
    """One rank's part. ``life``: the rank and its incarnation. ``size``: of what each says, :func:`packed_bytes`."""

    def __init__(self, registry: Registry, life: tuple[int, int], size: int) -> None:
        self._registry, self._rank, self._size, self._key = registry, life[0], size, _key(*life)

    def take_room(self) -> None:
        """Have a record in the registry from the start on: later the disk may be full."""
        self._show(_NO_EPOCH, bytes(self._size))

    def exchange(self, view: View, held: bytes, lives: Callable[[int], bool], within: float) -> dict[int, bytes] | None:
        """What each rank of ``view`` holds. None if one of them is gone, is in a later view, or does not say it in time."""
        self._show(view.epoch, held)
        heard = {self._rank: held}
        deadline = time.monotonic() + within
        while len(heard) < len(view.active):
            shown = self._registry.scan(_PREFIX)
            for rank in [each for each in view.active if each not in heard]:
                value = shown.get(_key(rank, view.incarnations[rank]), b"")
                epoch = _EPOCH.unpack_from(value)[0] if len(value) == _EPOCH.size + self._size else _NO_EPOCH
                if epoch == view.epoch:
                    heard[rank] = value[_EPOCH.size :]
                elif epoch > view.epoch or not lives(rank):
                    return None
            if len(heard) < len(view.active):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_PAUSE_S)
        return heard

    def _show(self, epoch: int, held: bytes) -> None:
        self._registry.publish(self._key, _EPOCH.pack(epoch) + held)


def _key(rank: int, incarnation: int) -> str:
    return f"{_PREFIX}r{rank}.i{incarnation}"
