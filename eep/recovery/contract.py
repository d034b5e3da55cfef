"""The contract of a valid instance, as functions that run in production after every change of membership.

1. *Peer set*: every active entry of the peer table is a mapped rank of the view, with its incarnation in the view.
2. *Expert coverage*: every expert that a request may ask for has a copy on an active rank.
3. *Graph-visible routing*: the tables that kernels read agree with the view and the placement, at unchanged addresses.

Each function raises :class:`ContractBroken` with the clause that broke. This rank must not serve then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from eep.abi.peer_table import PeerTable, slot_of
from eep.errors import EepError
from eep.view import View

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class PlacedExperts(Protocol):
    """What the contract reads of a placement of experts in slots."""

    @property
    def physical_to_logical(self) -> npt.NDArray[np.int64]: ...
    @property
    def logical_to_physical(self) -> npt.NDArray[np.int64]: ...
    @property
    def replica_counts(self) -> npt.NDArray[np.int64]: ...
    @property
    def masked(self) -> npt.NDArray[np.bool_]: ...
    def on(self, active: Iterable[int]) -> PlacedExperts: ...


class KernelTables(Protocol):
    """What the contract reads of the routing tables that kernels use."""

    @property
    def physical_to_logical(self) -> torch.Tensor: ...
    @property
    def logical_to_physical(self) -> torch.Tensor: ...
    @property
    def replica_counts(self) -> torch.Tensor: ...
    @property
    def masked(self) -> torch.Tensor: ...


class ContractBroken(EepError):
    """A clause of the contract does not hold. The defect is in EEP or in its caller, never in a peer."""

    def __init__(self, clause: str, sentence: str) -> None:
        super().__init__(f"the contract is broken, {clause}: {sentence}")
        self.clause = clause


def check_peers(view: View, table: PeerTable) -> None:
    """Checks clause 1, and the part of clause 3 that concerns the peer table."""
    if table.epoch != view.epoch:
        raise ContractBroken("peer set", f"the peer table shows epoch {table.epoch}, the view is epoch {view.epoch}")
    active = {*view.active}
    for rank in range(view.max_ranks):
        entry = table.peers[rank]
        if bool(entry.active) != (rank in active):
            state = "active" if entry.active else "inactive"
            raise ContractBroken("peer set", f"rank {rank} is {state} in the peer table, but not in the view")
        if not entry.active:
            continue
        if entry.incarnation != view.incarnations[rank]:
            raise ContractBroken(
                "peer set",
                f"the peer table has incarnation {entry.incarnation} of rank {rank}, the view has {view.incarnations[rank]}",
            )
        if not entry.region or not entry.control or entry.slot != slot_of(rank, entry.incarnation, view.max_ranks):
            raise ContractBroken("peer set", f"rank {rank} is active, but its memory is not mapped")


def check_coverage(view: View, placement: PlacedExperts) -> None:
    """Checks clause 2."""
    counts = placement.on(view.active).replica_counts
    missing = np.argwhere((counts == 0) & ~placement.masked)
    if len(missing):
        layer, expert = missing[0]
        raise ContractBroken(
            "expert coverage", f"{len(missing)} experts have no copy, among them expert {expert} of layer {layer}"
        )


def check_placements(view: View, mine: int | None, agreed: int | None) -> None:
    """Checks the part of clause 3 that ranks can only check together: the digest of the placement is that of most ranks."""
    if mine != agreed:
        raise ContractBroken(
            "graph-visible routing",
            f"most ranks placed the experts of epoch {view.epoch} differently from this rank, so this rank ends",
        )


def check_routing(placement: PlacedExperts, tables: KernelTables, addresses: Mapping[str, int]) -> None:
    """Checks clause 3. ``addresses``: what :func:`addresses_of` returned when the tables were made."""
    if addresses_of(tables) != dict(addresses):
        raise ContractBroken(
            "graph-visible routing", "a routing table has moved, and captured graphs hold its old address"
        )
    shown = tables.physical_to_logical.cpu().numpy()
    if not np.array_equal(shown, placement.physical_to_logical):
        layer, slot = np.argwhere(shown != placement.physical_to_logical)[0]
        raise ContractBroken(
            "graph-visible routing",
            f"slot {slot} of layer {layer} shows expert {shown[layer, slot]}, the placement has "
            f"{placement.physical_to_logical[layer, slot]}",
        )
    if not np.array_equal(tables.replica_counts.cpu().numpy(), placement.replica_counts):
        raise ContractBroken(
            "graph-visible routing", "the tables count other copies of an expert than the placement has"
        )
    listed, copies = tables.logical_to_physical.cpu().numpy(), placement.logical_to_physical
    if not np.array_equal(listed[:, :, : copies.shape[2]], copies) or (listed[:, :, copies.shape[2] :] >= 0).any():
        raise ContractBroken("graph-visible routing", "the tables list other slots of an expert than the placement has")
    if not np.array_equal(tables.masked.cpu().numpy(), placement.masked):
        raise ContractBroken("graph-visible routing", "the tables mask other experts than the placement does")


def check_choice(chosen: npt.NDArray[np.int64], shown: torch.Tensor, address: int) -> None:
    """Checks the part of clause 3 that says where tokens go. ``chosen[layer, expert, turn]`` is the slot of a token.
    ``shown`` has a column more, the first, for rows that are only padding, and was at ``address`` when it was made."""
    if shown.data_ptr() != address:
        raise ContractBroken("graph-visible routing", "the choice of copies has moved, and graphs hold its old address")
    read = shown.cpu().numpy()
    if not np.array_equal(read[:, 1:], chosen):
        layer, expert = np.argwhere((read[:, 1:] != chosen).any(axis=2))[0]
        raise ContractBroken(
            "graph-visible routing",
            f"tokens for expert {expert} of layer {layer} go to slots {sorted(set(read[layer, 1 + expert].tolist()))}, the "
            f"placement has them go to {sorted(set(chosen[layer, expert].tolist()))}",
        )
    if (read[:, 0] >= 0).any():
        raise ContractBroken("graph-visible routing", "rows that are only padding go to a slot")


def addresses_of(tables: KernelTables) -> dict[str, int]:
    """The addresses of the tables, for :func:`check_routing`."""
    named: dict[str, torch.Tensor] = {
        name: getattr(tables, name)
        for name in ("physical_to_logical", "logical_to_physical", "replica_counts", "masked")
    }
    return {name: tensor.data_ptr() for name, tensor in named.items()}
