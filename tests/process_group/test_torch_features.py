"""Parts of torch that ask a group for its devices and its backend: checkpoints, states of models, coalesced calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.process_group import torch_features
from tests.process_group.members import Members, values

Start = Callable[..., Members]
FLOAT = torch.float32


def test_a_group_names_its_devices_and_its_backend(group: Start) -> None:
    members = group(2)
    members.all(range(2), "new_group", "pair", [0, 1])
    for name in ("world", "pair"):
        devices, backend, supported = members[0].call("do", torch_features.device_types, name)
        assert (devices, backend, supported) == (["cpu"], "eep", [False, False, False])
    with pytest.raises(RuntimeError, match="takes tensors on cpu"):
        members[0].call("do", torch_features.backend_of_another_device)


def test_the_backend_of_a_group_makes_its_calls(group: Start) -> None:
    assert group(2).all(range(2), "do", torch_features.sum_by_the_backend) == {0: [3.0, 3.0], 1: [3.0, 3.0]}


def test_a_checkpoint_is_saved_in_the_background(group: Start, tmp_path: Path) -> None:
    members = group(2)
    for read in members.all(range(2), "do", torch_features.save_in_background, str(tmp_path / "saved")).values():
        assert read == {"shared": [0.0, 1.0, 2.0], "of 0": [0.0, 0.0], "of 1": [1.0, 1.0]}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_takes_its_state_from_rank_0(group: Start, sharded: bool) -> None:
    members = group(2)
    wanted = {"0.weight": [0.0] * 8, "0.bias": [1.0] * 4, "1.weight": [2.0] * 8, "1.bias": [3.0] * 2}
    for state in members.all(range(2), "do", torch_features.load_from_rank_0, sharded).values():
        assert state == wanted


@pytest.mark.parametrize("in_background", [False, True])
def test_coalesced_collectives(group: Start, in_background: bool) -> None:
    members = group(2)
    for name in torch_features.COALESCED:
        length = 8 if name == "reduce_scatter_single" else 4
        given = [[values(seed, rank, (length,), FLOAT) for rank in range(2)] for seed in range(3)]
        for by_device in (False, True):
            outs = members.all(range(2), "do", torch_features.coalesce, name, by_device, in_background)
            for rank in range(2):
                for out, parts in zip(outs[rank], given, strict=True):
                    if name == "all_gather_single":
                        wanted = torch.cat(parts)
                    elif name == "all_reduce":
                        wanted = parts[0] + parts[1]
                    else:
                        wanted = (parts[0] + parts[1])[4 * rank : 4 * rank + 4]
                    assert torch.equal(out, wanted), (name, by_device)


@pytest.mark.parametrize("in_background", [False, True])
def test_coalesced_messages(group: Start, in_background: bool) -> None:
    members = group(3)
    lengths = (3, 100_000, 1)  # the second does not fit into a pipe
    outs = members.all(range(3), "do", torch_features.coalesce_messages, lengths, in_background)
    for rank in range(3):
        for seed, (out, length) in enumerate(zip(outs[rank], lengths, strict=True)):
            assert torch.equal(out, values(seed, (rank - 1) % 3, (length,), FLOAT))
    members.all(range(3), "run", "all_reduce", 1)  # nothing is kept for the next call


def test_a_failure_in_a_batch_is_told_when_all_of_it_is_over(group: Start) -> None:
    members = group(2)
    members[0].send("do", torch_features.receive_coalesced, 1, (4, 3))
    for seed in (1, 2):
        members[1].call("send", 0, seed, 3)
    trouble, first, second = members[0].answer()
    assert "has 12 bytes, the tensor 16" in trouble
    assert torch.equal(first, torch.zeros(4))
    assert torch.equal(second, values(2, 1, (3,), FLOAT))


def test_a_batch_of_messages(group: Start) -> None:
    members = group(3)
    for rank, out in members.all(range(3), "do", torch_features.batch_messages, 20_000).items():
        assert torch.equal(out, values(1, (rank - 1) % 3, (20_000,), FLOAT))
