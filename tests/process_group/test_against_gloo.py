"""Every collective gives what gloo gives, for random shapes, types, operators and roots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.process_group.collective_calls import MOVES, REDUCTIONS, UNEVEN
from tests.process_group.members import GroupConfig, Members, members

SIZE = 3
CHUNK = 8192
ANY_TYPE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
OPS = ("SUM", "MIN", "MAX", "PRODUCT")
BITWISE = ("BAND", "BOR", "BXOR")
# Sizes around those at which a tensor is cut: none, one, a chunk, several.
SHAPES = st.one_of(
    st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
    st.integers(CHUNK // 8 - 3, CHUNK // 8 + 3).map(lambda n: (n,)),
    st.integers(1, 40_000).map(lambda n: (n,)),
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Members, Members]]:
    place: Path = tmp_path_factory.mktemp("groups")
    ours, theirs = GroupConfig(SIZE, chunk_bytes=CHUNK), GroupConfig(SIZE, backend="gloo")
    with members(place / "eep", ours) as eep_members, members(place / "gloo", theirs) as gloo_members:
        yield eep_members, gloo_members


def compare(both: tuple[Members, Members], name: str, seed: int, **kwargs: object) -> None:
    check_equal(*(group.all(range(SIZE), "run", name, seed, **kwargs) for group in both))


def check_equal(ours: dict[int, list[torch.Tensor]], theirs: dict[int, list[torch.Tensor]]) -> None:
    for rank in range(SIZE):
        assert len(ours[rank]) == len(theirs[rank])
        for mine, wanted in zip(ours[rank], theirs[rank], strict=True):
            assert torch.equal(mine, wanted), f"rank {rank}: {mine} is not {wanted}"


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(MOVES), st.integers(0, 999), SHAPES, st.sampled_from(ANY_TYPE), st.integers(0, SIZE - 1))
def test_what_is_moved(
    both: tuple[Members, Members], name: str, seed: int, shape: tuple[int, ...], dtype: torch.dtype, root: int
) -> None:
    compare(both, name, seed, shape=shape, dtype=dtype, root=root)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(REDUCTIONS),
    st.integers(0, 999),
    SHAPES,
    st.sampled_from(ANY_TYPE),
    st.sampled_from(OPS + BITWISE),
    st.integers(0, SIZE - 1),
)
def test_what_is_reduced(
    both: tuple[Members, Members],
    name: str,
    seed: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    op: str,
    root: int,
) -> None:
    if op in BITWISE and dtype.is_floating_point:
        dtype = torch.int32
    compare(both, name, seed, shape=shape, dtype=dtype, op=getattr(dist.ReduceOp, op), root=root)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 999), SHAPES, st.sampled_from(ANY_TYPE), st.sampled_from(OPS))
def test_what_is_reduced_in_blocks_of_different_sizes(
    both: tuple[Members, Members], seed: int, shape: tuple[int, ...], dtype: torch.dtype, op: str
) -> None:
    compare(both, UNEVEN, seed, shape=shape, dtype=dtype, op=getattr(dist.ReduceOp, op))


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(MOVES + REDUCTIONS),
    st.integers(0, 999),
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.sampled_from(("transposed", "strided")),
)
def test_tensors_that_are_not_contiguous(
    both: tuple[Members, Members], name: str, seed: int, shape: list[int], layout: str
) -> None:
    """Gloo is given contiguous ones: of tensors with gaps it refuses some, and writes others as if they had none."""
    ours = both[0].all(range(SIZE), "run", name, seed, shape=tuple(shape), layout=layout)
    check_equal(ours, both[1].all(range(SIZE), "run", name, seed, shape=tuple(shape)))


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from((*REDUCTIONS, UNEVEN)),
    st.integers(0, 999),
    SHAPES,
    st.sampled_from((torch.complex64, torch.complex128)),
)
def test_sums_of_complex_numbers(
    both: tuple[Members, Members], name: str, seed: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    compare(both, name, seed, shape=shape, dtype=dtype)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 999), st.integers(1, 5000), st.booleans())
def test_messages(both: tuple[Members, Members], seed: int, length: int, any_source: bool) -> None:
    for group in both:
        group[0].send("send", 1, seed, length, seed % 5)
        source, tensor = group[1].call("recv", None if any_source else 0, length, seed % 5)
        group[0].answer()
        assert source == 0
        if group is both[0]:
            ours = tensor
        else:
            assert torch.equal(ours, tensor)
