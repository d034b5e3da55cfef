"""Which expert each block of Triton's kernel works for, without a race.

SGLang sorts the picks of all rows by expert and divides them into blocks of one expert each. In its kernel for many picks
(``moe_align_block_size_kernel``) threads look up the expert of a block in shared memory that other threads may not have
written yet: a barrier is missing (SGLang's pull request 37663). That goes well unless a warp is delayed, as may happen when
other processes start on the GPU. Then a few experts silently work on tokens of others. The order of the picks is right in any
case, and every block begins with a pick. So the expert of a block is taken from its first pick.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_patches import hooks

_FEW_PICKS, _FEW_EXPERTS = 1024, 64
"""Below these SGLang takes another kernel, which has all its barriers."""


def register() -> None:
    hooks.hook("layers.moe.moe_runner.triton_utils.fused_moe.moe_align_block_size", _after_sorting, "after")


def _after_sorting(
    result: tuple[torch.Tensor, ...], topk_ids: torch.Tensor, block_size: int, num_experts: int, *_: Any, **__: Any
) -> tuple[torch.Tensor, ...]:
    if topk_ids.numel() < _FEW_PICKS and num_experts < _FEW_EXPERTS:
        return result
    order = result[0]
    return (order, experts_of_blocks(order, topk_ids, block_size), *result[2:])


def experts_of_blocks(order: torch.Tensor, topk_ids: torch.Tensor, block_size: int) -> torch.Tensor:
    """The expert of each block, -1 for picks of experts on other ranks. For blocks that are not in use it means nothing.

    ``order`` numbers the picks, flattened; a number beyond the last one is padding at the end of a block.
    """
    picks = topk_ids.flatten()
    return picks.index_select(0, order[::block_size].clamp(0, picks.numel() - 1)).to(order.dtype)
