"""Copies of rows between tensors on a GPU: many arrays in few launches, rows of any size."""

from __future__ import annotations

import pytest
import torch

from eep.data_plane.memory.row_copy import copy_rows


@pytest.mark.parametrize("arrays", [1, 3, 300])
@pytest.mark.parametrize("row", [(8, 128), (1, 576), (5,)], ids=["heads", "latent", "odd"])
def test_rows_arrive_and_no_other_changes(arrays: int, row: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    targets, sources = ([torch.randn(700, *row, device="cuda").bfloat16() for _ in range(arrays)] for _ in range(2))
    to = torch.randperm(700, device="cuda")[:450]
    source = torch.randint(700, (450,), device="cuda")
    wanted = [target.index_copy(0, to, origin[source]) for target, origin in zip(targets, sources, strict=True)]
    copy_rows(targets, sources, to, source)
    for target, want in zip(targets, wanted, strict=True):
        assert torch.equal(target, want)
