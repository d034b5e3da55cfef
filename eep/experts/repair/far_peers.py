"""The memory of ranks on other hosts, as repair reads it: through the transfer engine, and from where sealed records say.

A rank that lies can send wrong bytes, which do not verify. It can name an engine that is not there, or addresses that it did
not register: the read fails then. A read that does not end is given up. One failure is enough: for the rest of the repair
that rank is no source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from eep.data_plane.memory import Memory
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError
from eep.experts.backup.transport import TransferFailed, Transport
from eep.experts.held_slots import RegionPlace
from eep.experts.instance_hosts import InstanceHosts
from eep.experts.layout import ExpertLayout
from eep.experts.registry.published_records import RankRecord
from eep.experts.repair.reader import SourceLost, Want

logger = logging.getLogger(__name__)
_MOST_ADDRESS = 1 << 63


def show_region(hosts: InstanceHosts, rank: int, shared: Memory) -> RegionPlace:
    """Lets ranks of other hosts read ``shared``, which holds the slots of this rank and nothing else. Memory of a GPU they
    cannot read."""
    if not isinstance(shared, SharedMemory):
        return RegionPlace(hosts.number)
    try:
        return RegionPlace(hosts.number, hosts.transport.session, hosts.transport.expose(shared))
    except (EepError, ValueError) as error:
        logger.warning("other hosts cannot read experts from rank %d, which serves all the same: %s", rank, error)
        return RegionPlace(hosts.number)


def hide_region(hosts: InstanceHosts, place: RegionPlace) -> None:
    if place.session:
        hosts.transport.withdraw(place.address)


class FarPeers:
    """``record_of(rank)``: what the registry says now of the life of that rank that is in the view. ``layout``: that of all
    ranks. Readers of different ranks are used by several threads."""

    def __init__(
        self, transport: Transport, layout: ExpertLayout, record_of: Callable[[int], RankRecord | None]
    ) -> None:
        self._transport, self._layout, self._record_of = transport, layout, record_of
        self._failed: set[int] = set()

    def is_known(self, rank: int) -> bool:
        """Whether the registry still has a record of it."""
        return self._record_of(rank) is not None

    def is_source(self, rank: int) -> bool:
        return rank not in self._failed and self.is_known(rank)

    def read(self, rank: int, wants: Sequence[Want]) -> None:
        """Fill every ``into``, or raise :class:`SourceLost`."""
        record = self._record_of(rank)
        if record is None:
            raise SourceLost(f"rank {rank} is gone")
        if not record.session:
            raise SourceLost(f"rank {rank} does not show its memory to other hosts")
        parts: list[tuple[int, torch.Tensor]] = []
        for want in wants:
            pieces = self._layout.pieces(want.layer, want.slot)
            for (offset, length), into in zip(pieces, want.into, strict=True):
                address = record.address + offset
                if into.numel() != length or not 0 < address < _MOST_ADDRESS - length:
                    raise SourceLost(f"rank {rank} names an address that cannot be")
                parts.append((address, into))
        try:
            self._transport.read(record.session, parts)
        except TransferFailed as error:
            self._failed.add(rank)
            raise SourceLost(str(error)) from error


class FarReader:
    """One rank on another host as a source."""

    def __init__(self, peers: FarPeers, rank: int) -> None:
        self._peers, self._rank = peers, rank

    def alive(self) -> bool:
        return self._peers.is_source(self._rank)

    def read(self, wants: Sequence[Want]) -> None:
        self._peers.read(self._rank, wants)
