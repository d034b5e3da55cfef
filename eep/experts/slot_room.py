"""Memory for more slots than a rank usually has. Something else on the device gives it up, and gets it back.

The region of a rank has addresses for all slots that there may ever be (:mod:`eep.experts.placement.open_slots`). Those that
are not open have no memory behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from eep.data_plane.memory import Memory
from eep.experts.layout import ExpertLayout

_PIECES, _MOST_RANGES = 4, 400


class SlotRoom:
    """``usual``: how many slots are always open. ``take(size)`` has so many bytes taken from elsewhere, in all: if these are
    fewer than last time, some go back. It raises :class:`eep.EepError` if there are not so many. ``left``: how many slots the
    last life of this rank had open, and left as they were."""

    def __init__(
        self, layout: ExpertLayout, shared: Memory, usual: int, take: Callable[[int], None], left: int = 0
    ) -> None:
        self._layout, self._shared, self._take = layout, shared, take
        self.usual, self._paid = usual, usual
        self.slots = max(usual, left)
        """How many have memory. That of ``left`` was not taken from elsewhere in this life."""

    def open(self, slots: int) -> None:
        """Have memory for at least so many slots. EepError or OSError if there is none."""
        if slots > self._paid:
            self._take(self._bytes(slots))
            self._paid = slots
        if slots > self.slots:
            for start, size in slot_ranges(self._layout, self.slots, slots):
                self._shared.back(start, size)
            self.slots = slots

    def close(self, slots: int) -> None:
        """Keep memory for so many slots only, or as many as usual. Nothing is in the others that anybody needs."""
        slots = max(slots, self.usual)
        if slots < self.slots:
            # Up to the last one, open or not: a part of the memory goes when no slot in it is open any more.
            for start, size in slot_ranges(self._layout, slots, self._layout.slots):
                self._shared.give_up(start, size)
            self.slots = slots
        if slots < self._paid:
            self._take(self._bytes(slots))
            self._paid = slots

    def _bytes(self, slots: int) -> int:
        return sum(
            self._shared.cost_of(start, size)
            for start, size in slot_ranges(self._layout, self.usual, max(slots, self.usual))
        )


def slot_ranges(layout: ExpertLayout, first: int, end: int, most: int = 1) -> Iterator[tuple[int, int]]:
    """Where slots lie, of every tensor of every layer: offsets and sizes. ``most``: in how many pieces for each, at most."""
    steps = max(1, min(most, end - first))
    cuts = [first + (end - first) * step // steps for step in range(steps + 1)]
    for layer in range(layout.layers):
        for index, spec in enumerate(layout.tensors):
            for begin, stop in pairwise(cuts):
                yield layout.offset(layer, index) + begin * spec.nbytes, (stop - begin) * spec.nbytes


def loose_ranges(layout: ExpertLayout, usual: int) -> list[tuple[int, int]]:
    """Where memory may be given up, and had again. On a GPU each of them is memory of its own, so there are few."""
    pieces = max(1, min(_PIECES, _MOST_RANGES // (layout.layers * len(layout.tensors))))
    return list(slot_ranges(layout, usual, layout.slots, pieces))
