"""all_gather and all_reduce where hosts have several ranks: what crosses goes once, and sums are those of one host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.process_group.collective_calls import values
from tests.process_group.hosts.host_members import HostMembers

Start = Callable[..., HostMembers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_same_bits_as_on_one_host(hosts: Start, dtype: torch.dtype) -> None:
    group = hosts(0, 1, 0, 1, chunk_bytes=1 << 14)
    for length in (3, 20_000):
        given = [torch.randn(length, generator=torch.Generator().manual_seed(300 + rank)) for rank in range(4)]
        wanted = given[0].to(dtype).float()
        for tensor in given[1:]:
            wanted = wanted + tensor.to(dtype).float()
        for out in group.all(range(4), "run_floats", 3, length, dtype).values():
            assert torch.equal(out, wanted.to(dtype))


def test_sizes_that_differ_are_told_on_every_rank(hosts: Start) -> None:
    group = hosts(0, 0, 1, 1)
    for rank in range(4):
        group[rank].send("run", "all_reduce", 1, shape=(5 if rank < 2 else 6,))
    for rank in range(4):
        with pytest.raises(ValueError, match=r"called (something else|all_reduce)"):
            group[rank].answer()
    wanted = sum(values(2, rank, (5,), torch.float32) for rank in range(4))
    for out in group.all(range(4), "run", "all_reduce", 2).values():
        assert torch.equal(out[0], wanted)


@pytest.mark.parametrize("lost", [2, 3])
def test_a_first_or_a_later_rank_of_a_host_is_lost(hosts: Start, lost: int) -> None:
    group = hosts(0, 0, 1, 1, 1)
    others = [rank for rank in range(5) if rank != lost]
    for rank in others:
        group[rank].send("run_until_trouble", "all_gather", 1, shape=(3000,))
    group[lost].kill()
    for rank in others:
        assert group[rank].answer()[1] in ("EpochRevoked", "StepFailed")
    group.enter(others)
    for out in group.all(others, "run", "all_gather", 7).values():
        for rank, block in enumerate(out):
            wanted = values(7, rank, (5,), torch.float32) if rank != lost else torch.full((5,), 9.0)
            assert torch.equal(block, wanted)
    group.replace(lost, others)
    wanted = sum(values(8, rank, (5,), torch.float32) for rank in range(5))
    for out in group.all(range(5), "run", "all_reduce", 8).values():
        assert torch.equal(out[0], wanted)
