"""What gloo cannot be asked about: averages, determinism, async calls, subgroups, messages, objects, and errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import eep
from tests.process_group.collective_calls import values
from tests.process_group.members import Members

Start = Callable[..., Members]


def test_average_runs_over_the_ranks_and_rounds_integers_towards_zero(group: Start) -> None:
    members = group(3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64):
        given = torch.stack([values(1, rank, (700,), dtype).double() for rank in range(3)]).sum(0) / 3
        wanted = given.to(dtype) if dtype.is_floating_point else given.trunc().to(dtype)
        for (out,) in members.all(
            range(3), "run", "all_reduce", 1, shape=(700,), dtype=dtype, op=dist.ReduceOp.AVG
        ).values():
            assert torch.allclose(out.double(), wanted.double(), rtol=1e-2 if dtype.itemsize == 2 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [100, 60_000])
def test_the_same_bits_on_every_rank_and_every_run(group: Start, dtype: torch.dtype, length: int) -> None:
    members = group(4)
    outs = [members.all(range(4), "run_floats", 3, length, dtype) for _ in range(3)]
    first = outs[0][0]
    random = [torch.randn(length, generator=torch.Generator().manual_seed(300 + rank)).to(dtype) for rank in range(4)]
    wanted = random[0].float()
    for tensor in random[1:]:
        wanted = wanted + tensor.float()
    assert torch.equal(first, wanted.to(dtype)), "sums are taken in rank order, 16-bit ones in f32"
    assert all(torch.equal(out, first) for run in outs for out in run.values())


def test_async_works_run_in_order_and_sync_calls_wait_their_turn(group: Start) -> None:
    members = group(3)
    for seed in range(5):
        members.all(range(3), "start_async", seed, length=50_000)
    members.all(range(3), "run", "all_reduce", 99)
    for outs in members.all(range(3), "finish_async").values():
        for seed, out in enumerate(outs):
            assert torch.equal(out, sum(values(seed, rank, (50_000,), torch.float32) for rank in range(3)))


def test_subgroups_do_not_disturb_each_other(group: Start) -> None:
    members = group(4)
    members.all(range(4), "new_group", "even", [0, 2])
    members.all(range(4), "new_group", "odd", [1, 3])
    members.all([2, 3], "split", "last", [2, 3])
    for name, ranks in (("even", [0, 2]), ("odd", [1, 3]), ("last", [2, 3])):
        for out in members.all(ranks, "run", "all_reduce", 5, group=name).values():
            assert torch.equal(out[0], values(5, 0, (5,), torch.float32) + values(5, 1, (5,), torch.float32))


def test_groups_may_be_made_in_any_order_and_used_at_once(group: Start) -> None:
    members = group(2)
    for rank, order in ((0, ("a", "b")), (1, ("b", "a"))):
        for name in order:
            members[rank].call("named_split", name, [0, 1])
    for name in ("a", "b"):
        members.all([0, 1], "start_async", 2, group=name)
    for outs in members.all([0, 1], "finish_async").values():
        assert all(torch.equal(out, outs[0]) for out in outs)


def test_object_collectives(group: Start) -> None:
    members = group(3)
    for answer in members.all(range(3), "objects").values():
        assert answer == [{"rank": 0}, {"rank": 1}, {"rank": 2}, "from 0"]


def test_messages_wait_for_their_tag_and_pass_each_other(group: Start) -> None:
    members = group(2)
    for tag in (1, 2):
        members[0].call("send", 1, 10 + tag, 3, tag)
    for tag in (2, 1):
        assert torch.equal(members[1].call("recv", 0, 3, tag)[1], values(10 + tag, 0, (3,), torch.float32))
    # Longer than the pipe, in both directions at once.
    outs = {rank: members.processes[rank].send("exchange", 1 - rank, 300_000) for rank in (0, 1)}
    outs = {rank: members.processes[rank].answer() for rank in (0, 1)}
    assert torch.equal(outs[0], values(1, 1, (300_000,), torch.float32))


def test_a_message_of_another_size_is_an_error(group: Start) -> None:
    members = group(2)
    members[0].call("send", 1, 1, 3)
    with pytest.raises(ValueError, match="has 12 bytes, the tensor 16"):
        members[1].call("recv", 0, 4)
    members[0].send("send", 1, 2, 4)
    assert torch.equal(members[1].call("recv", 0, 4)[1], values(2, 0, (4,), torch.float32))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"name": "all_reduce", "shape": (5,)}, {"name": "all_reduce", "shape": (6,)}),
        ({"name": "all_reduce", "dtype": torch.int32}, {"name": "all_reduce", "dtype": torch.float32}),
        ({"name": "all_gather"}, {"name": "all_reduce"}),
        ({"name": "all_to_all", "shape": (3,)}, {"name": "all_to_all", "shape": (2,)}),
    ],
)
def test_members_that_call_different_things_are_told(
    group: Start, theirs: dict[str, object], ours: dict[str, object]
) -> None:
    members = group(2)
    for rank, call in ((0, dict(theirs)), (1, dict(ours))):
        members[rank].send("run", call.pop("name"), 1, **call)
    for rank in (0, 1):
        with pytest.raises(ValueError, match=f"rank {1 - rank}\\b"):
            members[rank].answer()
    members.all([0, 1], "run", "all_reduce", 3)


def test_bad_input_is_refused_and_changes_nothing(group: Start) -> None:
    members = group(2)
    for call, error, sentence in (
        ("overlapping", ValueError, "share memory"),
        ("sparse", ValueError, "to_dense"),
        ("bitwise_floats", ValueError, "needs integers"),
        ("too_few_outputs", ValueError, "one tensor for each of the 2 ranks"),
        ("bad_splits", ValueError, "split sizes"),
    ):
        with pytest.raises(error, match=sentence):
            members[0].call("bad", call)
    members.all([0, 1], "run", "all_reduce", 3)


def test_use_after_destroy_says_so(group: Start) -> None:
    members = group(2)
    for rank in (0, 1):
        with pytest.raises(eep.EepError, match="was destroyed"):
            members[rank].call("use_after_destroy")


def test_a_rank_that_leaves_early_does_not_spoil_what_it_has_finished(group: Start) -> None:
    members = group(3, timeout_ms=10_000)  # the last call waits for all of it
    for _ in range(5):
        members.all(range(3), "run", "all_reduce", 1, shape=(50_000,))
    members[0].send("run_and_destroy", 2)
    for rank in (1, 2):
        members[rank].send("run", "all_reduce", 2, shape=(50_000,))
    for rank in (0, 1, 2):
        members[rank].answer()
    with pytest.raises(eep.StepFailed):
        members[1].call("run", "all_reduce", 3)


def test_without_a_rendezvous_the_store_is_enough(tmp_path: object) -> None:
    """As most programs start: nothing but the backend's name."""
    import torch.multiprocessing as mp

    mp.spawn(_plain_program, args=(str(tmp_path),), nprocs=2)


def _plain_program(rank: int, path: str) -> None:
    import eep  # noqa: F401

    dist.init_process_group("eep", init_method=f"file://{path}/store", rank=rank, world_size=2)
    tensor = torch.ones(3) * (rank + 1)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3
    dist.destroy_process_group()
