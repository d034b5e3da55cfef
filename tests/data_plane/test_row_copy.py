"""Copies of rows between tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eep.data_plane.memory.row_copy import copy_rows

ROWS = 12


def tensors(shapes: list[tuple[int, ...]], first: int) -> list[torch.Tensor]:
    return [
        (torch.arange(ROWS * torch.Size(shape).numel()) + first).view(ROWS, *shape).to(torch.float32)
        for shape in shapes
    ]


@given(
    st.lists(st.sampled_from([(2, 4), (1,), (3, 1, 2), (0,)]), max_size=5),
    st.lists(st.integers(0, ROWS - 1), unique=True).flatmap(
        lambda to: st.tuples(st.just(to), st.lists(st.integers(0, ROWS - 1), min_size=len(to), max_size=len(to)))
    ),
)
def test_each_row_goes_where_it_is_wanted_and_no_other_changes(
    shapes: list[tuple[int, ...]], rows: tuple[list[int], list[int]]
) -> None:
    targets, sources = tensors(shapes, 0), tensors(shapes, 5000)
    wanted = [target.clone() for target in targets]
    to, source = (torch.tensor(each, dtype=torch.int64) for each in rows)
    for target, origin in zip(wanted, sources, strict=True):
        target[to] = origin[source]
    copy_rows(targets, sources, to, source)
    for target, want in zip(targets, wanted, strict=True):
        assert torch.equal(target, want)


@pytest.mark.parametrize(
    ("source", "rows", "why"),
    [
        (torch.zeros(4, 3), torch.tensor([1]), "cannot be copied to rows of"),
        (torch.zeros(4, 2, dtype=torch.float64), torch.tensor([1]), "cannot be copied to rows of"),
        (torch.zeros(2, 4).T, torch.tensor([1]), "in one piece"),
        (torch.zeros(4, 2), torch.tensor([1], dtype=torch.int32), "64-bit"),
        (torch.zeros(4, 2), torch.tensor([1, 2]), "as long as each other"),
    ],
)
def test_what_does_not_fit_is_refused(source: torch.Tensor, rows: torch.Tensor, why: str) -> None:
    target = torch.ones(4, 2)
    with pytest.raises(ValueError, match=why):
        copy_rows([target], [source], torch.tensor([0]), rows)
    assert torch.equal(target, torch.ones(4, 2))
