"""reduce_scatter of blocks that differ in size: one reduce for each member that is in the view, in their order.

The native call has one size for all blocks. Padding would do, but then no rank would see that another has cut its tensors
in another way: a reduce tells the rank whose block it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from eep.process_group import calls
from eep.process_group.call import Call, check


def is_uneven(blocks: Sequence[torch.Tensor]) -> bool:
    return any(block.numel() != blocks[0].numel() for block in blocks)


def reduce_scatter(
    output: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    op: Any,
    ranks: Sequence[int],
    active: Iterable[int],
    me: int,
) -> list[Call]:
    """``ranks`` of the instance are the members. ``active``, those that are in the view, and ``me`` are places among them."""
    if not output.is_cpu:
        raise ValueError(f"reduce_scatter: blocks that differ in size must be on the CPU, got {output.device}")
    if output.numel() != blocks[me].numel():
        raise ValueError(
            f"reduce_scatter: the block of this rank has {blocks[me].numel()} elements, its output {output.numel()}"
        )
    check("reduce_scatter", output, *blocks)
    batch = [calls.reduce_into(output if place == me else None, blocks[place], op, ranks[place]) for place in active]
    # The name and the result of the batch are those of the call that the user made.
    for call in batch:
        call.name, call.tensors = "reduce_scatter", []
    batch[0].tensors = [output, *blocks]
    return batch
