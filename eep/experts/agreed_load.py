"""How much each expert is asked for, in numbers on which all ranks of a view agree.

Each rank counts the tokens that it sends, and no two count the same. Ranks that plan a placement must start from equal
numbers. So all take those of the first rank of the view, which shows them in the registry under the number of the epoch.
Requests are spread evenly, so what one rank sees is a fair sample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from eep.experts.placement.packing import FloatArray
from eep.experts.registry.directory_registry import Registry
from eep.view import View

_PREFIX = "load/"
_PAUSE_S = 0.005
_WITHIN_S = 20.0  # less than a rank waits for a peer to enter an epoch: a rank without numbers will not enter it


class AgreedLoad:
    """One rank's part. ``counted`` gives ``[layers, experts]``, what this rank has counted so far."""

    def __init__(self, registry: Registry, rank: int, counted: Callable[[], FloatArray]) -> None:
        self._registry, self._rank, self._counted = registry, rank, counted
        self._shown = ""

    def of(self, view: View, first_lives: Callable[[int], bool]) -> FloatArray | None:
        """The numbers for ``view``. None if its first rank is gone, is in a later view, or does not answer."""
        first, key = min(view.active), f"{_PREFIX}{view.epoch}"
        if first == self._rank:
            counted = np.array(self._counted(), dtype="<f8")
            if self._shown:
                self._registry.withdraw(self._shown)
            self._registry.publish(key, counted.tobytes())
            self._shown = key
            return counted
        deadline, shape = time.monotonic() + _WITHIN_S, self._counted().shape
        while time.monotonic() < deadline:
            shown = self._registry.scan(_PREFIX)
            if key in shown:
                return _numbers(shown[key], shape)
            if not first_lives(first) or any(_epoch(each) > view.epoch for each in shown):
                return None
            time.sleep(_PAUSE_S)
        return None


def _epoch(key: str) -> int:
    number = key.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() else -1


def _numbers(value: bytes, shape: tuple[int, ...]) -> FloatArray | None:
    """None if ``value`` holds no counts of that shape."""
    if len(value) != 8 * math.prod(shape):
        return None
    numbers = np.frombuffer(value, dtype="<f8").reshape(shape)
    return numbers if np.isfinite(numbers).all() and (numbers >= 0).all() else None
