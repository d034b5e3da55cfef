"""What the slots of each rank hold, as ranks tell each other in a registry.

A record may be a moment old. So whoever reads from a peer's slot verifies what it has read.
"""

from __future__ import annotations

import time
from typing import NamedTuple

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
_PAUSE_S = 0.01


class RegionPlace(NamedTuple):
    """Where ranks of other hosts read the slots of a rank: the number of its host, its engine, and the address there. No
    engine: they cannot."""

    host: int = 0
    session: str = ""
    address: int = 0


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
        place: RegionPlace | None = None,
        heard_within: float = 0.0,
    ) -> None:
        """``life``: the rank and its incarnation. ``index`` is for its next life. ``offer`` is told what the slots hold.
        ``heard_within``: how many seconds to wait for what ranks of a view say, where a store passes it on."""
        self._registry, self._rank = registry, life[0]
        self._name = _HELD + _life_name(*life)
        self.table: IntArray = table.copy()
        self._shape, self._checksums, self._index, self._offer = shape, checksums, index, offer
        self._place, self._heard_within = place or RegionPlace(), heard_within
        self._loaded = Checksums(checksums.values.copy(), checksums.known.copy())
        """What this rank knew before it had heard of any other."""
        self.unlike: dict[int, int] = {}
        """Of the view that was looked at last: the ranks whose experts have other bytes, and how many of them."""

    def publish(self) -> None:
        """Say what this rank holds: to its peers, to its next life, and to the backups."""
        experts = self._checksums.values.shape[1]
        layers = np.arange(self.table.shape[0])[:, None]
        numbers = np.where(self.table == EMPTY, EMPTY, layers * experts + self.table)
        sums = np.take_along_axis(self._checksums.values, np.maximum(self.table, 0), axis=1)
        record = RankRecord(
            host=self._place.host,
            session=self._place.session,
            address=self._place.address,
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
        self.unlike = {}
        for rank, record in self._heard(view).items():
            stored = record.slot_numbers().reshape(-1, size)
            if clashes := checksum_sources.count_clashes(self._loaded, record, stored):
                self.unlike[rank] = clashes
            checksum_sources.learn_from_rank(self._checksums, record, stored)
            table[:, rank * size : (rank + 1) * size] = np.where(stored == EMPTY, EMPTY, stored % experts)
        if self._rank in view.active:
            table[:, self._rank * size : (self._rank + 1) * size] = self.table
        return Placement(table, experts, size)

    def records(self, view: View) -> dict[int, RankRecord]:
        """What the other ranks of ``view`` say of themselves, as far as it fits."""
        records = decode_records(self._registry.scan(_HELD), _HELD, RankRecord)
        found = {rank: records.get(_life_name(rank, view.incarnations[rank])) for rank in self._others(view)}
        return {
            rank: record
            for rank, record in found.items()
            if record is not None and record.slots == self.table.shape[1] and record.shape == self._shape
        }

    def _heard(self, view: View) -> dict[int, RankRecord]:
        """The same when all have said it, or when the time for it is over."""
        deadline = time.monotonic() + self._heard_within
        while len(found := self.records(view)) < len(self._others(view)) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        return found

    def _others(self, view: View) -> list[int]:
        return [rank for rank in view.active if rank != self._rank]


def _life_name(rank: int, incarnation: int) -> str:
    return f"r{rank}.i{incarnation}"
