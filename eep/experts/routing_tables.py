"""The placement as kernels see it: tables at addresses that never change, patched in place between steps.

The tables are as large as the capacity of the instance, so that no placement ever needs new ones and graphs
that were captured over them stay valid.
"""

from __future__ import annotations

import torch

from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import Placement


class RoutingTables:
    """``physical_to_logical``, ``logical_to_physical``, ``replica_counts`` and ``masked``, for all layers.

    ``logical_to_physical[layer, expert]`` lists the slots of an expert and is filled up with ``EMPTY``; only
    the first ``replica_counts[layer, expert]`` entries count. A gate must not pick an expert that is
    ``masked``.
    """

    def __init__(
        self, layers: int, experts: int, slots: int, max_copies: int, device: torch.device | str = "cpu"
    ) -> None:
        self.physical_to_logical = torch.full((layers, slots), EMPTY, dtype=torch.int32, device=device)
        shape = (layers, experts, max_copies)
        self.logical_to_physical = torch.full(shape, EMPTY, dtype=torch.int32, device=device)
        self.replica_counts = torch.zeros((layers, experts), dtype=torch.int32, device=device)
        self.masked = torch.ones((layers, experts), dtype=torch.bool, device=device)

    def publish(self, placement: Placement) -> None:
        """Show ``placement`` to the kernels. Call it between steps. An error changes nothing."""
        layers, experts, max_copies = self.logical_to_physical.shape
        slots = self.physical_to_logical.shape[1]
        if (placement.layers, placement.experts) != (layers, experts):
            raise ValueError(
                f"the tables are for {layers} layers of {experts} experts, the placement is for "
                f"{placement.layers} layers of {placement.experts}"
            )
        if placement.physical_to_logical.shape[1] != slots:
            raise ValueError(f"the tables have {slots} slots, the placement {placement.physical_to_logical.shape[1]}")
        copies = placement.logical_to_physical.shape[2]
        if copies > max_copies:
            raise ValueError(
                f"an expert has {copies} copies, but the tables hold {max_copies}: plan with max_copies={max_copies}"
            )
        self.physical_to_logical.copy_(torch.from_numpy(placement.physical_to_logical.copy()))
        self.logical_to_physical[:, :, :copies].copy_(torch.from_numpy(placement.logical_to_physical))
        self.logical_to_physical[:, :, copies:] = EMPTY
        self.replica_counts.copy_(torch.from_numpy(placement.replica_counts))
        self.masked.copy_(torch.from_numpy(placement.masked))
