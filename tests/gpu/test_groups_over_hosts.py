"""Process groups on CUDA tensors whose ranks are on two hosts: two addresses of the loopback network, all on one GPU.

What libfabric needs where it cannot be installed, ``test_hosts.py`` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.data_plane.transport.requirements import why_no_links
from tests.process_group.collective_calls import values
from tests.process_group.hosts.host_members import HostMembers, HostsConfig

ALL = range(4)
CONFIG = HostsConfig(size=4, device="cuda", hosts=(0, 0, 1, 1))

_reason = why_no_links("cuda")
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[HostMembers]:
    with HostMembers(tmp_path / "r", CONFIG, timeout_ms=20_000) as members:
        members.begin()
        yield members


def check_sums(group: HostMembers, ranks: Sequence[int], seed: int, length: int = 5) -> None:
    wanted = torch.stack([values(seed, rank, (length,), torch.float32) for rank in ranks]).sum(0)
    for (out,) in group.all(ranks, "run", "all_reduce", seed, shape=(length,)).values():
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("length", [1, 1000, 30_001, 300_000, 2_000_000])
def test_sums_of_every_size_are_those_of_one_host(group: HostMembers, length: int) -> None:
    """In one round, in two, and in many."""
    for seed in range(3):
        check_sums(group, ALL, seed, length)


@pytest.mark.parametrize("length", [7, 40_000])
def test_bytes_that_move_arrive(group: HostMembers, length: int) -> None:
    kept = {"shape": (length,), "dtype": torch.bfloat16}
    gathered = torch.cat([values(3, rank, (length,), torch.bfloat16) for rank in ALL])
    for (out,) in group.all(ALL, "run", "all_gather_single", 3, **kept).values():
        assert torch.equal(out, gathered)
    for name in ("all_gather", "reduce_scatter_single", "all_to_all_single", "broadcast"):
        for seed in range(3):
            here = group.all(ALL, "run", name, seed, **kept)
            there = group.all(ALL, "run_on", "cpu", name, seed, **kept)
            for rank in ALL:
                assert all(torch.equal(a, b) for a, b in zip(here[rank], there[rank], strict=True)), (name, rank)


@pytest.mark.without_mps
def test_a_rank_is_lost_and_comes_back(group: HostMembers) -> None:
    check_sums(group, ALL, 1, 5000)
    for rank in (0, 1, 3):
        group[rank].send("run_until_trouble", "all_reduce", 2)
    group[2].kill()
    for rank in (0, 1, 3):
        assert group[rank].answer()[1] in ("EpochRevoked", "StepFailed")
    group.enter((0, 1, 3))
    check_sums(group, (0, 1, 3), 4, 5000)
    group.replace(2, (0, 1, 3))
    check_sums(group, ALL, 5, 300_000)
