"""Entries of a cache on the GPU go to pages in host memory, and back."""

from __future__ import annotations

import numpy as np
import torch

from eep.data_plane.memory.page_copy import PageCopy
from eep.requests.kv.copy_layout import PAGE
from sglang_patches.rank.kv.copied_pages import PageBuffers, layout_of, unload

ROWS, CONTEXT, SLOTS, MOST = 4, 100, 500, 3


def test_pages_are_gathered_beside_other_work_and_read_back() -> None:
    generator = torch.Generator().manual_seed(5)
    layers = [
        torch.randn(SLOTS, *shape, generator=generator).to("cuda", torch.bfloat16) for shape in ((2, 24), (2, 16)) * 3
    ]
    table = torch.randint(SLOTS, (ROWS, CONTEXT), generator=generator, dtype=torch.int32).to("cuda")
    page_bytes = layout_of(layers).page_bytes
    content = torch.zeros(10 * page_bytes, dtype=torch.uint8)
    copy = PageCopy(table, layers, content, page_bytes=page_bytes, page_tokens=PAGE, most=MOST)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy.tanh()
    where, to = [(3, 0), (1, 2), (3, 1)], np.array([7, 0, 4])
    places = np.array([row * CONTEXT + number * PAGE for row, number in where])
    assert copy(places, to).tolist() == [True] * len(where)
    torch.cuda.synchronize()
    back = [torch.zeros_like(layer) for layer in layers]
    slots = torch.arange(100, 100 + 2 * PAGE - 3, device="cuda")
    pages = content.view(-1, page_bytes)[[7, 4]].reshape(-1)
    unload(pages.to("cuda"), back, slots, 3)
    torch.cuda.synchronize()
    for copied, layer in zip(back, layers, strict=True):
        assert torch.equal(copied[slots], layer[table[3, 3 : 2 * PAGE].long()])
        assert not copied[:100].any()


def test_pages_are_brought_back_in_turns() -> None:
    """Each turn waits until its buffer is free, and stands until the same buffer is filled again."""
    page_bytes, most, turns = 1 << 20, 8, 12
    buffers = PageBuffers(torch.device("cuda"), page_bytes, most)
    busy = torch.randn(4096, 4096, device="cuda")
    kept = []
    for turn in range(turns):
        for _ in range(5):
            busy = busy @ busy.tanh()
        count = most - turn % 3

        def fill(pages: np.ndarray, turn: int = turn) -> None:
            pages[:] = np.arange(turn, turn + len(pages), dtype=np.uint8)[:, None]

        kept.append((count, buffers.bring(count, fill).clone()))
    torch.cuda.synchronize()
    for turn, (count, content) in enumerate(kept):
        assert torch.equal(content.view(count, -1)[:, -1].cpu(), torch.arange(turn, turn + count, dtype=torch.uint8))
        assert torch.equal(content.view(count, -1)[:, 0].cpu(), torch.arange(turn, turn + count, dtype=torch.uint8))
