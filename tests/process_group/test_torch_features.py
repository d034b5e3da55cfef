"""Parts of torch that ask a group for its devices and its backend, or its works for their futures: checkpoints, states of
models, coalesced calls, DDP's join."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.process_group import torch_features
from tests.process_group.collective_calls import values
from tests.process_group.members import GroupConfig, Members, members

SIZE = 3
FLOAT = torch.float32


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """One set for all: what is tested takes long to import."""
    with members(tmp_path_factory.mktemp("group") / "ranks", GroupConfig(SIZE)) as started:
        yield started


def test_a_group_names_its_devices_and_its_backend(three: Members) -> None:
    three.all(range(SIZE), "new_group", "subgroup", [0, 1])
    for name in ("world", "subgroup"):
        devices, backend, supported = three[0].call("do", torch_features.device_types, name)
        assert (devices, backend, supported) == (["cpu"], "eep", [False, False, False])
    with pytest.raises(RuntimeError, match="takes tensors on cpu"):
        three[0].call("do", torch_features.backend_of_another_device)


def test_the_backend_of_a_group_makes_its_calls(three: Members) -> None:
    assert set(map(tuple, three.all(range(SIZE), "do", torch_features.sum_by_the_backend).values())) == {(6.0, 6.0)}


@pytest.mark.parametrize("own_group", [False, True])
def test_a_checkpoint_is_saved_in_the_background(three: Members, tmp_path: Path, own_group: bool) -> None:
    wanted = {"shared": [0.0, 1.0, 2.0]} | {f"of {rank}": [float(rank)] * 2 for rank in range(SIZE)}
    path = str(tmp_path / "saved")
    for read in three.all(range(SIZE), "do", torch_features.save_in_background, path, own_group).values():
        assert read == wanted


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_takes_its_state_from_rank_0(three: Members, sharded: bool) -> None:
    wanted = {"0.weight": [0.0] * 8, "0.bias": [1.0] * 4, "1.weight": [2.0] * 8, "1.bias": [3.0] * 2}
    for state in three.all(range(SIZE), "do", torch_features.load_from_rank_0, sharded).values():
        assert state == wanted


@pytest.mark.parametrize("by_initial_size", [False, True])
def test_ranks_that_have_no_more_inputs_join(three: Members, by_initial_size: bool) -> None:
    # Of each batch, over all ranks or over those that still have one.
    gradients = [6.0, 8.0, 6.0] if by_initial_size else [6.0, 12.0, 18.0]
    outs = three.all(range(SIZE), "do", torch_features.gradients_of_uneven_inputs, by_initial_size)
    assert outs == {rank: gradients[: rank + 1] for rank in range(SIZE)}


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("name", torch_features.COALESCED)
def test_coalesced_collectives(three: Members, name: str, in_background: bool) -> None:
    length = 4 * SIZE if name == "reduce_scatter_single" else 4
    given = [[values(seed, rank, (length,), FLOAT) for rank in range(SIZE)] for seed in range(3)]
    for by_device in (False, True):
        outs = three.all(range(SIZE), "do", torch_features.coalesce, name, by_device, in_background)
        for rank in range(SIZE):
            for out, parts in zip(outs[rank], given, strict=True):
                whole = torch.cat(parts) if name == "all_gather_single" else torch.stack(parts).sum(0)
                wanted = whole[4 * rank : 4 * rank + 4] if name == "reduce_scatter_single" else whole
                assert torch.equal(out, wanted), by_device


@pytest.mark.parametrize("in_background", [False, True])
def test_coalesced_messages(three: Members, in_background: bool) -> None:
    lengths = (3, 100_000, 1)  # the second does not fit into a pipe
    outs = three.all(range(SIZE), "do", torch_features.coalesce_messages, lengths, in_background)
    for rank in range(SIZE):
        for seed, (out, length) in enumerate(zip(outs[rank], lengths, strict=True)):
            assert torch.equal(out, values(seed, (rank - 1) % SIZE, (length,), FLOAT))


def test_a_failure_in_a_batch_is_told_when_all_of_it_is_over(three: Members) -> None:
    three[0].send("do", torch_features.receive_coalesced, 1, (4, 3))
    for seed in (1, 2):
        three[1].call("send", 0, seed, 3)
    trouble, first, second = three[0].answer()
    assert "has 12 bytes, the tensor 16" in trouble
    assert torch.equal(first, torch.zeros(4))
    assert torch.equal(second, values(2, 1, (3,), FLOAT))


def test_a_batch_of_messages(three: Members) -> None:
    for rank, out in three.all(range(SIZE), "do", torch_features.batch_messages, 20_000).items():
        assert torch.equal(out, values(1, (rank - 1) % SIZE, (20_000,), FLOAT))


def test_a_batch_of_messages_to_oneself_is_refused(three: Members) -> None:
    ends = three[1].call("do", torch_features.batch_to_itself)
    assert len(ends) == 2
    assert all("rank 1 is this rank itself" in end for end in ends)
    three.all(range(SIZE), "run", "barrier", 1)
