"""The DeepEP interface: bad arguments, calls of normal mode, and a buffer that was destroyed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import eep
from eep.compat.deep_ep import Buffer
from tests import moe
from tests.compat.deep_ep_ranks import (
    SMALL,
    Fleet,
    combine_of,
    dispatch,
    mask,
    new_buffer,
    raises,
    run_experts,
    step,
)

ACTIVE = tuple(range(SMALL.ranks))
EXPERTS = SMALL.ranks * SMALL.local_experts


def batch_of(buffer: Buffer) -> moe.Batch:
    return moe.make_batch(SMALL, buffer.rank, 1, ACTIVE, 4)


class Place:
    """No group of PyTorch's: all that a buffer needs of one, where ranks are told where to meet."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank, group.size


def play_bad_constructors(group: dist.ProcessGroup) -> None:
    raises(eep.EepError, "does not support comm", Buffer, group, comm=object())
    raises(TypeError, "group must be a process group", Buffer, dist.GroupMember.NON_GROUP_MEMBER)
    raises(TypeError, "group must be a process group", Buffer, Place(group))
    raises(ValueError, "max_ranks is 1", Buffer, group, max_ranks=1)
    raises(ValueError, "timeout_ms", Buffer, group, timeout_ms=0)
    raises(ValueError, "EEP_RENDEZVOUS", Buffer, None)
    raises(eep.EepError, "explicitly_destroy", Buffer(group).destroy)


def play_bad_dispatches(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group)
    check_refused_dispatches(buffer)  # before there is any memory
    step(buffer, SMALL, 0, ACTIVE)
    check_refused_dispatches(buffer)
    x, idx = batch_of(buffer).x, batch_of(buffer).topk_idx
    for words, bad in (
        ("expert slots go from", torch.full_like(idx, SMALL.max_ranks * SMALL.local_experts)),
        ("expert slots go from", torch.full_like(idx, -2)),
        ("top-k", torch.zeros(4, 17, dtype=torch.int64)),
        ("top-k", torch.zeros(4, 0, dtype=torch.int64)),
    ):
        raises(ValueError, words, buffer.low_latency_dispatch, x, bad, SMALL.max_tokens, EXPERTS)
    step(buffer, SMALL, 2, ACTIVE)
    buffer.barrier()
    buffer.destroy()


def check_refused_dispatches(buffer: Buffer) -> None:
    x, idx = batch_of(buffer).x, batch_of(buffer).topk_idx
    for kind, words, change in (
        (TypeError, "x must be torch.bfloat16", {"x": x.float()}),
        (TypeError, "x must be a tensor, got NoneType", {"x": None}),
        (TypeError, "topk_idx must be a tensor, got list", {"topk_idx": idx.tolist()}),
        (ValueError, "x must be of shape", {"x": x[0]}),
        (ValueError, "contiguous", {"x": torch.zeros(4, 1024, dtype=torch.bfloat16)[:, ::2]}),
        (TypeError, "topk_idx must be torch.int64", {"topk_idx": idx.int()}),
        (ValueError, "topk_idx must be of shape", {"topk_idx": idx[:3]}),
        (ValueError, "num_max_dispatch_tokens_per_rank allows 3", {"num_max_dispatch_tokens_per_rank": 3}),
        (ValueError, "max_tokens must be", {"num_max_dispatch_tokens_per_rank": 70_000}),
        (ValueError, "multiple of the number of ranks, 3", {"num_experts": EXPERTS + 1}),
        (ValueError, "round_scale", {"use_ue8m0": True}),
        (eep.EepError, "choose one", {"async_finish": True, "return_recv_hook": True}),
        (eep.EepError, "does not support", {"dispatch_wait_recv_cost_stats": torch.zeros(4)}),
        (ValueError, "recv_stats must be of shape", {"cumulative_local_expert_recv_stats": idx[0].int()}),
    ):
        arguments: dict[str, Any] = {
            "x": x,
            "topk_idx": idx,
            "num_max_dispatch_tokens_per_rank": SMALL.max_tokens,
            "num_experts": EXPERTS,
        }
        raises(kind, words, buffer.low_latency_dispatch, **{**arguments, **change})


def play_bad_sizes(group: dist.ProcessGroup) -> None:
    """A dispatch of other sizes makes other memory, and ends what is in flight. Not so one that is refused."""
    buffer = new_buffer(group)
    batch = batch_of(buffer)
    recv_x, count, handle, _, _ = dispatch(buffer, SMALL, batch, use_fp8=False)
    for words, hidden, topk in (
        ("multiple of 128, got 200", 200, 3),
        ("top-k must be between 1 and 16, got 17", 256, 17),
    ):
        x, idx = torch.zeros(4, hidden, dtype=torch.bfloat16), torch.zeros(4, topk, dtype=torch.int64)
        raises(ValueError, words, buffer.low_latency_dispatch, x, idx, SMALL.max_tokens, EXPERTS)
    combined, _, _ = combine_of(buffer, batch, handle)(run_experts(buffer, SMALL, recv_x, count))
    assert torch.equal(combined, moe.reference(SMALL, batch))
    buffer.barrier()
    buffer.destroy()


def play_bad_masks(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group)
    step(buffer, SMALL, 0, ACTIVE)
    raises(ValueError, "mask_status must be", buffer.low_latency_query_mask_buffer, torch.zeros(3).int())
    raises(TypeError, "mask_status must be a tensor", buffer.low_latency_query_mask_buffer, None)
    raises(ValueError, "outside the capacity", buffer.low_latency_update_mask_buffer, 4, True)
    raises(ValueError, "outside the capacity", buffer.connect_ranks, [-1])
    raises(ValueError, "cannot disconnect itself", buffer.disconnect_ranks, [buffer.rank])
    buffer.connect_ranks([3], activate=False)
    step(buffer, SMALL, 2, ACTIVE)
    buffer.barrier()
    buffer.destroy()


def play_bad_combines(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group)
    batch = batch_of(buffer)
    x, idx, weights = batch.x, batch.topk_idx, batch.topk_weights
    recv_x, count, handle, _, _ = dispatch(buffer, SMALL, batch, use_fp8=False, async_finish=True)
    output = run_experts(buffer, SMALL, recv_x, count)
    for kind, words, change in (
        (TypeError, "x must be torch.bfloat16", {"x": output.float()}),
        (ValueError, "x must be of shape", {"x": output[:1]}),
        (ValueError, "topk_idx must be of shape", {"topk_idx": idx[:3]}),
        (ValueError, "did not send", {"topk_idx": idx + 1}),
        (TypeError, "topk_weights must be torch.float32", {"topk_weights": weights.double()}),
        (ValueError, "topk_weights must be of shape", {"topk_weights": weights[:, :1]}),
        (ValueError, "out must be of shape", {"out": torch.zeros(5, SMALL.hidden, dtype=torch.bfloat16)}),
        (TypeError, "out must be torch.bfloat16", {"out": torch.zeros(4, SMALL.hidden)}),
        (TypeError, "handle must be what a dispatch returned, with 5 parts, got NoneType", {"handle": None}),
        (TypeError, "with 5 parts, got tuple of 4", {"handle": handle[:4]}),
        (eep.EepError, "no dispatch belongs", {"handle": (handle[0].clone(), *handle[1:])}),
        (eep.EepError, "does not support", {"combine_wait_recv_cost_stats": torch.zeros(4)}),
        (eep.EepError, "choose one", {"async_finish": True, "return_recv_hook": True}),
    ):
        arguments = {"x": output, "topk_idx": idx, "topk_weights": weights, "handle": handle}
        raises(kind, words, buffer.low_latency_combine, **{**arguments, **change})
    idx_of_some = torch.where(torch.arange(SMALL.topk) == 0, idx, -1)
    combined, _, _ = buffer.low_latency_combine(output, idx_of_some, weights, handle)
    assert torch.equal(combined, moe.reference(SMALL, moe.Batch(x, idx_of_some, weights)))
    step(buffer, SMALL, 2, ACTIVE)
    buffer.barrier()
    buffer.destroy()


@pytest.mark.parametrize(
    "play", [play_bad_constructors, play_bad_dispatches, play_bad_sizes, play_bad_masks, play_bad_combines]
)
def test_bad_arguments_raise_and_change_nothing(fleet: Fleet, play: Callable[[dist.ProcessGroup], None]) -> None:
    fleet.finish(fleet.start(play, SMALL.ranks))


def play_in_a_place(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(Place(group))  # type: ignore[arg-type]
    step(buffer, SMALL, 0, ACTIVE)
    buffer.barrier()
    buffer.destroy()


def test_where_ranks_know_where_to_meet_a_group_needs_only_a_rank_and_a_size(
    fleet: Fleet, rendezvous: eep.Rendezvous
) -> None:
    fleet.finish(fleet.start(play_in_a_place, SMALL.ranks, EEP_RENDEZVOUS=str(rendezvous.path)))


def play_masked_while_alive(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group)
    step(buffer, SMALL, 0, ACTIVE)
    batch = batch_of(buffer)
    buffer.barrier()
    dist.barrier()
    if buffer.rank < 2:
        recv_x, _, handle, _, hook = dispatch(buffer, SMALL, batch, use_fp8=False, return_recv_hook=True)
        buffer.low_latency_update_mask_buffer(2, True)
        raises(eep.EepError, "came or went", hook)
        raises(eep.EepError, "came or went", combine_of(buffer, batch, handle), recv_x)
        assert mask(buffer) == [0, 0, 1, 1]
        raises(ValueError, "stale", buffer.low_latency_update_mask_buffer, 2, False)
        step(buffer, SMALL, 3, (0, 1))
    dist.barrier()
    buffer.destroy()


def test_a_masked_rank_that_lives_stays_out(fleet: Fleet) -> None:
    """Only a new process may take its place."""
    fleet.finish(fleet.start(play_masked_while_alive, SMALL.ranks))


def play_destroyed(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group)
    batch = batch_of(buffer)
    recv_x, _, handle, _, _ = dispatch(buffer, SMALL, batch, use_fp8=False)
    buffer.barrier()
    dist.barrier()
    buffer.destroy()
    buffer.destroy()
    assert not os.path.exists(buffer.rendezvous) or buffer.rank != 0
    for call in (
        lambda: dispatch(buffer, SMALL, batch),
        lambda: combine_of(buffer, batch, handle)(recv_x),
        lambda: mask(buffer),
        lambda: buffer.connect_ranks([0]),
        buffer.low_latency_clean_mask_buffer,
        buffer.barrier,
    ):
        raises(eep.EepError, "destroyed", call)


def test_a_destroyed_buffer_refuses_every_call(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_destroyed, SMALL.ranks))


def test_calls_between_hosts_say_what_to_do_instead(
    rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EEP_RENDEZVOUS", str(rendezvous.path))
    monkeypatch.setenv("EEP_RANK", "0")
    monkeypatch.setenv("EEP_WORLD_SIZE", "1")
    buffer = Buffer(None)
    for name in ("internode_dispatch", "internode_combine", "get_local_buffer_tensor"):
        raises(eep.EepError, f"^{name}: .*; use ", getattr(buffer, name), torch.zeros(1))
