"""What the peer table says of each rank in a view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eep.abi.peer_table import (
    TRANSPORT_LOCAL,
    TRANSPORT_MAPPED,
    TRANSPORT_NONE,
    TRANSPORT_REMOTE,
    PeerTable,
    slot_of,
)
from eep.data_plane.memory.exchange import Offer
from eep.data_plane.transport.remote_hosts import LinkedPeer
from eep.view import View


@dataclass(frozen=True, slots=True)
class OwnEntry:
    """The rank whose table it is, and where its memory lies."""

    rank: int
    region: int
    control: int


def patch_table(table: PeerTable, view: View, own: OwnEntry, peers: Mapping[int, Offer | LinkedPeer]) -> None:
    """Makes ``table`` show ``view``. A rank that is neither ``own`` nor among ``peers`` is not active in it."""
    active = {*view.active}
    for rank in range(view.max_ranks):
        entry, known = table.peers[rank], max(view.incarnations[rank], 0)
        transport, region, control = _reach(rank, own, peers.get(rank)) if rank in active else (TRANSPORT_NONE, 0, 0)
        wanted = {
            "active": int(transport != TRANSPORT_NONE),
            "transport": transport,
            "incarnation": known,
            "slot": slot_of(rank, known, view.max_ranks),
            "region": region,
            "control": control,
        }
        if any(getattr(entry, field) != value for field, value in wanted.items()):
            for field, value in wanted.items():
                setattr(entry, field, value)
            entry.epoch = view.epoch
    table.epoch = view.epoch


def _reach(rank: int, own: OwnEntry, peer: Offer | LinkedPeer | None) -> tuple[int, int, int]:
    """How that rank is reached, and the addresses of its region and its control page."""
    if rank == own.rank:
        return TRANSPORT_LOCAL, own.region, own.control
    if peer is None:
        return TRANSPORT_NONE, 0, 0
    transport = TRANSPORT_REMOTE if isinstance(peer, LinkedPeer) else TRANSPORT_MAPPED
    return transport, peer.region.address, peer.control.address
