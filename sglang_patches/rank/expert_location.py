"""Which slot holds which expert, and to which copy this rank sends its tokens.

Rank ``r`` owns ``slots_per_rank`` slots from ``r * slots_per_rank`` on. All ranks start from the same placement, a pure
function of the command line and the model. So a rank that starts alone loads the experts that its peers expect it to have. So
does a rank that is added later: no expert moves when it joins.
"""

from __future__ import annotations

import numpy as np
import torch

from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import Placement, plan_placement
from eep.experts.routing_tables import RoutingTables
from eep.recovery.contract import addresses_of, check_routing


def initial_placement(layers: int, experts: int, slots_per_rank: int, ranks: int, max_ranks: int) -> Placement:
    """What each of ``max_ranks`` loads. The first ``ranks``, with which a server starts, hold every expert among them. The
    others hold further copies. All are on one host."""
    load, host = np.ones((layers, experts)), [0] * max_ranks
    at_start = plan_placement(load, None, range(ranks), slots_per_rank, host)
    return plan_placement(load, at_start, range(max_ranks), slots_per_rank, host)


def experts_in_slots(placement: Placement, rank: int, layer: int) -> list[int]:
    """The expert in each slot of a rank, ``EMPTY`` for none."""
    size = placement.slots_per_rank
    held: list[int] = placement.physical_to_logical[layer, rank * size : (rank + 1) * size].tolist()
    return held


class ExpertLocation:
    """The placement in force, and ``choice[layer, 1 + expert]``: the slot to which this rank sends its tokens. The first
    column is for expert -1, of rows that are only padding: they go nowhere.

    The tensors keep their addresses: a new placement is written into them between steps.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self.tables = RoutingTables(
            placement.layers,
            placement.experts,
            placement.max_ranks * placement.slots_per_rank,
            placement.max_ranks,
            device,
        )
        self.choice = torch.full((placement.layers, placement.experts + 1), EMPTY, dtype=torch.int64, device=device)
        self._addresses = addresses_of(self.tables)
        self.publish(placement)

    def publish(self, placement: Placement) -> None:
        """Send tokens by ``placement`` from the next step on."""
        self.tables.publish(placement)
        self.choice[:, 1:].copy_(torch.from_numpy(choose_copies(placement, self.rank)))
        self.placement = placement
        check_routing(placement, self.tables, self._addresses)


def choose_copies(placement: Placement, rank: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """``[layers, experts]``: the copy that ``rank`` uses. It is its own if it has one; else ranks share out the copies."""
    slots = placement.logical_to_physical
    counts = placement.replica_counts
    turn = rank % np.maximum(counts, 1)
    chosen = np.take_along_axis(slots, turn[..., None], axis=2)[..., 0]
    own = slots // placement.slots_per_rank == rank
    own &= slots != EMPTY
    mine = np.take_along_axis(slots, own.argmax(axis=2)[..., None], axis=2)[..., 0]
    result: np.ndarray[tuple[int, int], np.dtype[np.int64]] = np.where(own.any(axis=2), mine, chosen)
    return result
