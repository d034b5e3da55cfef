"""How much each expert is asked for, in numbers on which all ranks of a view agree.

Each rank counts the tokens that it sends, and no two count the same. Ranks that plan a placement must start from equal
numbers. So all take those of the first rank of the view, which shows them in the registry with the number of the epoch.
Every rank shows counts from its start on, as those of no epoch: so it has its room in the registry when the disk is full.
Requests are spread evenly, so what one rank sees is a fair sample.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable

import numpy as np

from eep.experts.placement.packing import FloatArray
from eep.experts.registry.directory_registry import Registry
from eep.view import View

_PREFIX = "load/"
_NO_EPOCH = -1
_EPOCH = struct.Struct("<q")
_PAUSE_S = 0.005
_WITHIN_S = 20.0  # less than a rank waits for a peer to enter an epoch: a rank without numbers will not enter it


class AgreedLoad:
    """One rank's part. ``counted`` gives ``[layers, experts]``, what this rank has counted so far."""

    def __init__(self, registry: Registry, rank: int, incarnation: int, counted: Callable[[], FloatArray]) -> None:
        self._registry, self._rank, self._counted = registry, rank, counted
        self._key = _key(rank, incarnation)

    def take_room(self) -> None:
        """Show counts that are for no epoch."""
        self._show(_NO_EPOCH)

    def of(self, view: View, first_lives: Callable[[int], bool]) -> FloatArray | None:
        """The numbers for ``view``. None if its first rank is gone, is in a later view, or does not answer."""
        first = min(view.active)
        if first == self._rank:
            return self._show(view.epoch)
        key = _key(first, view.incarnations[first])
        deadline, shape = time.monotonic() + _WITHIN_S, self._counted().shape
        while time.monotonic() < deadline:
            shown = self._registry.scan(key).get(key, b"")
            epoch = _EPOCH.unpack_from(shown)[0] if len(shown) >= _EPOCH.size else _NO_EPOCH
            if epoch == view.epoch:
                return _numbers(shown[_EPOCH.size :], shape)
            if not first_lives(first) or epoch > view.epoch:
                return None
            time.sleep(_PAUSE_S)
        return None

    def _show(self, epoch: int) -> FloatArray:
        counted = np.array(self._counted(), dtype="<f8")
        self._registry.publish(self._key, _EPOCH.pack(epoch) + counted.tobytes())
        return counted


def _key(rank: int, incarnation: int) -> str:
    return f"{_PREFIX}r{rank}.i{incarnation}"


def _numbers(value: bytes, shape: tuple[int, ...]) -> FloatArray | None:
    """None if ``value`` holds no counts of that shape."""
    if len(value) != 8 * math.prod(shape):
        return None
    numbers = np.frombuffer(value, dtype="<f8").reshape(shape)
    return numbers if np.isfinite(numbers).all() and (numbers >= 0).all() else None
