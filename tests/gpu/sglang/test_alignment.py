"""SGLang's kernel that sorts picks by expert, on a GPU that is busy: what is made of its answer is right every time."""

from __future__ import annotations

import torch

from sglang_patches.cuda import alignment
from tests.sglang_patches.cuda.test_alignment import sorted_picks

ROWS, TOPK, EXPERTS, BLOCK, TIMES = 1024, 4, 16, 16, 20_000


def test_experts_of_blocks_while_the_gpu_is_busy() -> None:
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    random = torch.Generator().manual_seed(1)
    topk_ids = torch.randint(0, EXPERTS, (ROWS, TOPK), generator=random, dtype=torch.int32)
    topk_ids[torch.rand(ROWS, generator=random) < 0.9] = -1
    _, wanted, used = sorted_picks(topk_ids, BLOCK, EXPERTS)
    blocks = used // BLOCK
    expected, ids = wanted[:blocks].cuda(), topk_ids.cuda()
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    noise, beside = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for number in range(TIMES):
        if number % 50 == 0:
            with torch.cuda.stream(beside):
                torch.mm(noise, noise)
        order, experts, _ = moe_align_block_size(ids, BLOCK, EXPERTS)
        found = alignment.experts_of_blocks(order, ids, BLOCK)
        wrong[0] += (experts[:blocks] != expected).any()
        wrong[1] += (found[:blocks] != expected).any()
    theirs, ours = wrong.tolist()
    print(f"of {TIMES} answers of the kernel {theirs} were wrong")
    assert ours == 0
