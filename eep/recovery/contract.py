"""The contract of a valid instance, as functions that run in production after every change of membership.

1. *Peer set*: every active entry of the peer table is a rank of the view, as it is in the view, and mapped.
2. *Expert coverage*: every expert that may be asked for has a copy on an active rank.
3. *Graph-visible routing*: the tables that kernels read say what the view and the placement say, where they always were.

Each raises :class:`ContractBroken` with the clause that broke; nothing may be served then.
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


class Placed(Protocol):
    """What the contract asks of a placement of experts in slots."""

    @property
    def physical_to_logical(self) -> npt.NDArray[np.int64]: ...
    @property
    def replica_counts(self) -> npt.NDArray[np.int64]: ...
    @property
    def masked(self) -> npt.NDArray[np.bool_]: ...
    def on(self, active: Iterable[int]) -> Placed: ...


class Tables(Protocol):
    """What the contract asks of the tables that kernels read."""

    @property
    def physical_to_logical(self) -> torch.Tensor: ...
    @property
    def replica_counts(self) -> torch.Tensor: ...


class ContractBroken(EepError):
    """A clause of the contract does not hold. This is a defect of EEP or of its caller, never of a peer."""

    def __init__(self, clause: str, sentence: str) -> None:
        super().__init__(f"the contract is broken, {clause}: {sentence}")
        self.clause = clause


def check_peers(view: View, table: PeerTable) -> None:
    """Clause 1, and of clause 3 what concerns the peer table."""
    if table.epoch != view.epoch:
        raise ContractBroken("peer set", f"the table shows epoch {table.epoch}, the view is epoch {view.epoch}")
    for rank in range(view.max_ranks):
        entry = table.peers[rank]
        if bool(entry.active) != (rank in view.active):
            raise ContractBroken("peer set", f"rank {rank} is {'' if entry.active else 'in'}active in the table only")
        if not entry.active:
            continue
        if entry.incarnation != view.incarnations[rank]:
            raise ContractBroken(
                "peer set",
                f"the table has incarnation {entry.incarnation} of rank {rank}, the view {view.incarnations[rank]}",
            )
        if not entry.region or not entry.control or entry.slot != slot_of(rank, entry.incarnation, view.max_ranks):
            raise ContractBroken("peer set", f"rank {rank} is active, but its memory is not mapped")


def check_coverage(view: View, placement: Placed) -> None:
    """Clause 2."""
    counts = placement.on(view.active).replica_counts
    missing = np.argwhere((counts == 0) & ~placement.masked)
    if len(missing):
        layer, expert = missing[0]
        raise ContractBroken(
            "expert coverage", f"{len(missing)} experts have no copy, among them expert {expert} of layer {layer}"
        )


def check_routing(placement: Placed, tables: Tables, addresses: Mapping[str, int]) -> None:
    """Clause 3. ``addresses`` are those that :func:`addresses_of` gave when the tables were made."""
    if addresses_of(tables) != dict(addresses):
        raise ContractBroken("graph-visible routing", "a routing table has moved; captured graphs hold its old address")
    shown = tables.physical_to_logical.cpu().numpy()
    if not np.array_equal(shown, placement.physical_to_logical):
        layer, slot = np.argwhere(shown != placement.physical_to_logical)[0]
        raise ContractBroken(
            "graph-visible routing",
            f"slot {slot} of layer {layer} shows expert {shown[layer, slot]}, the placement has "
            f"{placement.physical_to_logical[layer, slot]}",
        )
    if not np.array_equal(tables.replica_counts.cpu().numpy(), placement.replica_counts):
        raise ContractBroken("graph-visible routing", "the tables count other copies than the placement has")


def addresses_of(tables: Tables) -> dict[str, int]:
    """Where the tables lie, for :func:`check_routing`."""
    named: dict[str, torch.Tensor] = {
        name: getattr(tables, name)
        for name in ("physical_to_logical", "logical_to_physical", "replica_counts", "masked")
    }
    return {name: tensor.data_ptr() for name, tensor in named.items()}
