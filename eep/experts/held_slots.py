"""What the slots of each rank hold, as ranks tell each other in a registry.

A record may be a moment old. So whoever reads from a peer's slot verifies what it has read.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from eep.experts.backup.live_offer import LiveOffer
from eep.experts.checksums import Checksums
from eep.experts.placement.packing import EMPTY, IntArray
from eep.experts.placement.slot_plan import Placement
from eep.experts.registry.directory_registry import Registry
from eep.experts.registry.published_records import ModelShape, RankRecord, decode_records, encode_record
from eep.experts.repair import checksum_sources
from eep.experts.slot_index import SlotIndex
from eep.view import View

_HELD = "held/"


class HeldSlots:
    """``table[layer, slot]``: what this rank holds. A caller that changes it says so with :meth:`publish`."""

    def __init__(
        self,
        registry: Registry,
        life: tuple[int, int],
        table: IntArray,
        shape: ModelShape,
        checksums: Checksums,
        index: SlotIndex | None = None,
        offer: LiveOffer | None = None,
    ) -> None:
        """``life``: the rank and its incarnation. ``index`` is for its next life. ``offer`` is told what the slots hold."""
        self._registry, self._rank = registry, life[0]
        self._name = _HELD + _life_name(*life)
        self.table: IntArray = table.copy()
        self._shape, self._checksums, self._index, self._offer = shape, checksums, index, offer

    def publish(self) -> None:
        """Say what this rank holds: to its peers, to its next life, and to the backups."""
        experts = self._checksums.values.shape[1]
        layers = np.arange(self.table.shape[0])[:, None]
        numbers = np.where(self.table == EMPTY, EMPTY, layers * experts + self.table)
        sums = np.take_along_axis(self._checksums.values, np.maximum(self.table, 0), axis=1)
        record = RankRecord(
            host=0,
            session="",
            address=0,
            slots=self.table.shape[1],
            shape=self._shape,
            numbers=numbers.astype("<i8").tobytes(),
            checksums=sums.astype("<u8").tobytes(),
        )
        self.note()
        self._registry.publish(self._name, encode_record(record))
        if self._offer is not None:
            self._offer.holds(self.table, self._checksums)

    def note(self) -> None:
        """Say what this rank holds to its next life only."""
        if self._index is not None:
            self._index.note(self.table, self._checksums)

    def forget(self) -> None:
        """The next life finds nothing here."""
        if self._index is not None:
            self._index.clear()

    def of(self, view: View, like: Placement) -> Placement:
        """What each slot holds, as far as the ranks of the view have said, in the form of ``like``. Learns what the bytes of
        these experts must be."""
        table = np.full_like(like.physical_to_logical, EMPTY)
        size, experts = like.slots_per_rank, like.experts
        records = decode_records(self._registry.scan(_HELD), _HELD, RankRecord)
        for rank in _others(view.active, self._rank):
            record = records.get(_life_name(rank, view.incarnations[rank]))
            if record is None or record.slots != size or record.shape != self._shape:
                continue
            stored = record.slot_numbers().reshape(-1, size)
            checksum_sources.learn_from_rank(self._checksums, record, stored)
            table[:, rank * size : (rank + 1) * size] = np.where(stored == EMPTY, EMPTY, stored % experts)
        if self._rank in view.active:
            table[:, self._rank * size : (self._rank + 1) * size] = self.table
        return Placement(table, experts, size)


def _life_name(rank: int, incarnation: int) -> str:
    return f"r{rank}.i{incarnation}"


def _others(ranks: Iterable[int], rank: int) -> list[int]:
    return [each for each in ranks if each != rank]
