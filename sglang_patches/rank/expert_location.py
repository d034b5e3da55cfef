"""Which slot holds which expert, and to which copy this rank sends its tokens.

Rank ``r`` owns ``slots_per_rank`` slots from ``r * slots_per_rank`` on. All ranks start from the same placement, a pure
function of the command line and the model. So a rank that starts alone loads the experts that its peers expect it to have. So
does a rank that is added later: no expert moves when it joins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eep.experts.instance_hosts import LEAST_COPIES
from eep.experts.placement.packing import EMPTY, IntArray
from eep.experts.placement.slot_plan import Placement, plan_placement
from eep.experts.routing_tables import RoutingTables
from eep.recovery.contract import addresses_of, check_choice, check_routing


def initial_placement(
    layers: int,
    experts: int,
    slots_per_rank: int,
    ranks: int,
    max_ranks: int,
    topology: Sequence[int] | None = None,
) -> Placement:
    """What each of ``max_ranks`` loads. The first ``ranks``, with which a server starts, hold every expert among them. The
    others hold further copies. ``topology``: the host of each of ``max_ranks``; None if all are on one. Then second copies
    are on another host, where slots allow."""
    load, host = np.ones((layers, experts)), topology or [0] * max_ranks
    least = LEAST_COPIES if len(set(host)) > 1 else 1
    at_start = plan_placement(load, None, range(ranks), slots_per_rank, host, least_copies=least)
    return plan_placement(load, at_start, range(max_ranks), slots_per_rank, host, least_copies=least)


def experts_in_slots(placement: Placement, rank: int, layer: int) -> list[int]:
    """The expert in each slot of a rank, ``EMPTY`` for none."""
    size = placement.slots_per_rank
    held: list[int] = placement.physical_to_logical[layer, rank * size : (rank + 1) * size].tolist()
    return held


TURNS = 12
"""How many ways there are to choose among the copies of an expert. Up to four copies, and six, get equal shares."""


class ExpertLocation:
    """The placement in force, and ``choice[layer, 1 + expert, turn]``: the slot to which this rank sends a token whose turn
    that is. The first column is for expert -1, of rows that are only padding: they go nowhere.

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
        shape = (placement.layers, placement.experts + 1, TURNS)
        self.choice = torch.full(shape, EMPTY, dtype=torch.int64, device=device)
        self._addresses, self._choice_address = addresses_of(self.tables), self.choice.data_ptr()
        self._show(placement, placement)

    def publish(self, placement: Placement, routed: Placement) -> None:
        """Send tokens to the copies in ``routed``, which are some or all of ``placement``, from the next step on.

        Kernels must have read until now what was published last, and read this from now on. Else this rank must not serve:
        :class:`~eep.recovery.contract.ContractBroken`."""
        self.check()
        self._show(placement, routed)

    def check(self) -> None:
        """Compare what kernels read with what was published last."""
        check_routing(self.placement, self.tables, self._addresses)
        check_choice(self._chosen, self.choice, self._choice_address)

    def _show(self, placement: Placement, routed: Placement) -> None:
        self.placement, self._chosen = placement, choose_copies(routed, self.rank)
        self.tables.publish(placement)
        self.choice[:, 1:].copy_(torch.from_numpy(self._chosen))
        self.check()


def choose_copies(placement: Placement, rank: int) -> IntArray:
    """``[layers, experts, turns]``: the copies that ``rank`` uses. It is its own if it has one; else all share its tokens, by
    turns. So each copy of an expert gets as much as any other if all ranks have as much to send."""
    slots = placement.logical_to_physical
    counts = placement.replica_counts
    turn = (rank + np.arange(TURNS)) % np.maximum(counts, 1)[..., None]
    chosen = np.take_along_axis(slots, turn, axis=2)
    own = slots // placement.slots_per_rank == rank
    own &= slots != EMPTY
    mine = np.take_along_axis(slots, own.argmax(axis=2)[..., None], axis=2)
    result: IntArray = np.where(own.any(axis=2)[..., None], mine, chosen)
    return result


def find_turns(column: torch.Tensor) -> torch.Tensor:
    """``[tokens, 1]``: the turn of each token, from what the first gate picks for it. So it depends on the token alone, and
    neither on its row nor on the tokens beside it: the same token is computed in the same way in any batch."""
    return column.sum(dim=1, keepdim=True) % TURNS
