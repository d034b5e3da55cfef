"""The process group on CUDA tensors: the same calls as on CPU tensors, without NCCL, several ranks on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import eep
from tests.process_group.collective_calls import values
from tests.process_group.members import GroupConfig, Members, members

pytestmark = pytest.mark.gpu
CONFIG = GroupConfig(size=4, device="cuda")


def check_sums(group: Members, ranks: list[int], seed: int, length: int = 5) -> None:
    wanted = torch.stack([values(seed, rank, (length,), torch.float32) for rank in ranks]).sum(0)
    for (out,) in group.all(ranks, "run", "all_reduce", seed, shape=(length,)).values():
        assert torch.equal(out, wanted)


def test_collectives_lose_a_rank_and_take_it_back(tmp_path: Path) -> None:
    with members(tmp_path / "ranks", CONFIG, timeout_ms=20_000) as group:
        for length in (1, 1000, 300_000):
            check_sums(group, [0, 1, 2, 3], length, length)
        for name in ("all_gather", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast"):
            on_gpu = group.all(range(4), "run", name, 3, shape=(7,), dtype=torch.bfloat16)
            for rank in range(4):
                assert all(torch.isfinite(out).all() for out in on_gpu[rank])
        gathered = torch.cat([values(3, rank, (7,), torch.bfloat16) for rank in range(4)])
        for (out,) in group.all(range(4), "run", "all_gather_single", 3, shape=(7,), dtype=torch.bfloat16).values():
            assert torch.equal(out, gathered)
        group[1].kill()
        for rank in (0, 2, 3):
            with pytest.raises(eep.EpochRevoked):
                group[rank].call("run", "all_reduce", 1)
        group.all([0, 2, 3], "deactivate", [1])
        check_sums(group, [0, 2, 3], 11)
        group.relaunch(1).call("run", "all_reduce", 5)  # alone
        group[1].send("join")
        group.all([0, 2, 3], "recover", [1])
        group[1].answer()
        check_sums(group, [0, 1, 2, 3], 12, 5000)
