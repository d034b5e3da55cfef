"""Which expert each block of Triton's kernel works for, found from the order of the picks alone."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.cuda import alignment


def sorted_picks(topk_ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """As SGLang's kernel leaves them: the order, the expert of each block, and how many places are in use."""
    picks = topk_ids.flatten().tolist()
    order: list[int] = []
    of_block: list[int] = []
    for expert in range(-1, experts):
        mine = [number for number, pick in enumerate(picks) if pick == expert]
        random.Random(expert).shuffle(mine)  # atomics give no order within an expert
        padded = -(-len(mine) // block) * block
        order += mine + [len(picks)] * (padded - len(mine))
        of_block += [expert] * (padded // block)
    room = len(picks) + (experts + 1) * (block - 1)
    blocks = -(-room // block)
    used = len(order)
    order += [len(picks)] * (room - used)
    of_block += [-7] * (blocks - len(of_block))
    return torch.tensor(order, dtype=torch.int32), torch.tensor(of_block, dtype=torch.int32), used


@given(st.data())
def test_a_block_is_the_expert_of_its_first_pick(data: st.DataObject) -> None:
    experts, topk = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    picks = st.lists(st.lists(st.integers(-1, experts - 1), min_size=topk, max_size=topk), min_size=1, max_size=30)
    topk_ids = torch.tensor(data.draw(picks), dtype=torch.int32)
    block = data.draw(st.sampled_from([1, 2, 4, 16]))
    order, of_block, used = sorted_picks(topk_ids, block, experts)
    order[used:] = data.draw(st.integers(-(2**31), 2**31 - 1))  # the kernel does not say what is there
    found = alignment.experts_of_blocks(order, topk_ids, block)
    assert found.shape == of_block.shape
    assert found.dtype == of_block.dtype
    assert torch.equal(found[: used // block], of_block[: used // block])


def test_what_the_kernel_for_few_picks_says_is_left_alone() -> None:
    few = (torch.zeros(4, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32), torch.tensor([4]))
    assert alignment._after_sorting(few, torch.zeros(1, 4, dtype=torch.int32), 4, 16) is few


def test_many_picks_are_looked_at_again() -> None:
    topk_ids = torch.arange(2048, dtype=torch.int32).remainder(17).sub(1).view(512, 4)
    order, of_block, used = sorted_picks(topk_ids, 16, 16)
    raced = torch.zeros_like(of_block)
    kept, found, padded = alignment._after_sorting((order, raced, torch.tensor([used])), topk_ids, 16, 16)
    assert kept is order
    assert torch.equal(found[: used // 16], of_block[: used // 16])
    assert int(padded) == used
