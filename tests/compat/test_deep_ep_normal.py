"""DeepEP's normal mode, in real processes: every tensor compared with a plain computation over all ranks' tokens."""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import eep
from eep.compat.deep_ep import Buffer, Config
from tests import moe
from tests.compat.deep_ep_ranks import SMALL, Fleet, mask, new_buffer, raises, step

ACTIVE = tuple(range(SMALL.ranks))
EXPERTS, LOCAL = SMALL.ranks * SMALL.local_experts, SMALL.local_experts


def batches_of(seed: int, tokens: dict[int, int], hidden: int = 256) -> dict[int, moe.Batch]:
    config = dataclasses.replace(SMALL, hidden=hidden)
    return {rank: moe.make_batch(config, rank, seed, ACTIVE, tokens[rank]) for rank in ACTIVE}


def goes_to(batch: moe.Batch, rank: int) -> torch.Tensor:
    """The tokens of a batch that have an expert on ``rank``, in order."""
    return ((batch.topk_idx >= 0) & (batch.topk_idx // LOCAL == rank)).any(1).nonzero().squeeze(1)


def layout_of(buffer: Buffer, batch: moe.Batch) -> dict[str, Any]:
    per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.topk_idx, EXPERTS)
    assert per_host is None
    assert per_rank.dtype == per_expert.dtype == torch.int32
    assert per_rank.tolist() == [len(goes_to(batch, rank)) for rank in ACTIVE]
    assert per_expert.tolist() == [int((batch.topk_idx == expert).sum()) for expert in range(EXPERTS)]
    for rank in ACTIVE:
        assert in_rank[:, rank].nonzero().squeeze(1).tolist() == goes_to(batch, rank).tolist()
    return {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = moe.quantize(x, "fp8")
    assert scales is not None
    return values, scales


def expected(batches: dict[int, moe.Batch], rank: int, of: Callable[[moe.Batch], torch.Tensor]) -> torch.Tensor:
    return torch.cat([of(batch)[goes_to(batch, rank)] for batch in batches.values()])


def check_dispatch(buffer: Buffer, batches: dict[int, moe.Batch], use_fp8: bool, alignment: int) -> Any:
    batch, me = batches[buffer.rank], buffer.rank
    x: Any = quantized(batch.x) if use_fp8 else batch.x
    recv_x, idx, weights, counts, handle, event = buffer.dispatch(
        x,
        **layout_of(buffer, batch),
        topk_idx=batch.topk_idx,
        topk_weights=batch.topk_weights,
        expert_alignment=alignment,
        config=Config(20, 8, 256),
        previous_event=buffer.capture(),
        async_finish=True,
    )
    event.current_stream_wait()
    if use_fp8:
        assert torch.equal(
            recv_x[0].view(torch.uint8), expected(batches, me, lambda b: quantized(b.x)[0].view(torch.uint8))
        )
        assert torch.equal(recv_x[1], expected(batches, me, lambda b: quantized(b.x)[1]))
    else:
        assert torch.equal(recv_x, expected(batches, me, lambda b: b.x))
    all_idx = expected(batches, me, lambda b: b.topk_idx)
    here = (all_idx >= 0) & (all_idx // LOCAL == me)
    assert torch.equal(idx, torch.where(here, all_idx % LOCAL, -1))
    assert torch.equal(weights, torch.where(here, expected(batches, me, lambda b: b.topk_weights), 0))
    rows = [int((idx == expert).sum()) for expert in range(LOCAL)]
    assert counts == [-(-count // alignment) * alignment for count in rows]
    prefix, _, _, source, _, _ = handle
    assert prefix[:, me].tolist() == torch.tensor([len(goes_to(b, me)) for b in batches.values()]).cumsum(0).tolist()
    assert source.tolist() == expected(batches, me, lambda b: torch.arange(len(b.x))).tolist()
    return recv_x, weights, handle


def check_combine(buffer: Buffer, batch: moe.Batch, handle: Any, weights: torch.Tensor, output: torch.Tensor) -> None:
    """``output``: every row times the rank that it is on, plus one."""
    ranks = torch.stack([torch.isin(torch.arange(len(batch.x)), goes_to(batch, rank)) for rank in ACTIVE])
    biases = (torch.ones_like(batch.x), batch.x.clone())
    for bias in (None, biases[0], biases):
        sum_of = torch.zeros(batch.x.shape)
        for each in biases[: 0 if bias is None else 1 if bias is biases[0] else 2]:
            sum_of += each.float()
        for rank in ACTIVE:
            sum_of += torch.where(ranks[rank].unsqueeze(1), (batch.x * (rank + 1)).float(), 0)
        combined, combined_weights, event = buffer.combine(output, handle, topk_weights=weights, bias=bias)
        with event:
            pass
        assert torch.equal(combined, sum_of.to(torch.bfloat16))
        assert torch.equal(combined_weights, torch.where(batch.topk_idx >= 0, batch.topk_weights, 0))


def play_normal(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group, max_ranks=SMALL.ranks)
    for seed, (tokens, hidden) in enumerate(
        [
            ({0: 5, 1: 0, 2: 9}, 256),
            ({0: 0, 1: 0, 2: 0}, 256),
            ({0: 3000, 1: 1200, 2: 70}, 512),  # more than fits a piece, and another size
        ]
    ):
        batches = batches_of(seed, tokens, hidden)
        batch = batches[buffer.rank]
        check_dispatch(buffer, batches, use_fp8=True, alignment=1)
        recv_x, weights, handle = check_dispatch(buffer, batches, use_fp8=False, alignment=16)
        check_combine(buffer, batch, handle, weights, recv_x * (buffer.rank + 1))
        # The same ways again, with other tokens.
        again, *nothing, _ = buffer.dispatch(batch.x * 2, handle=handle)
        assert torch.equal(again, recv_x * 2)
        assert nothing == [None] * 4
        both, *_ = buffer.dispatch(quantized(batch.x), handle=handle)
        assert torch.equal(both[1], expected(batches, buffer.rank, lambda b: quantized(b.x)[1]))
    buffer.destroy()


def test_tokens_and_sums(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_normal, SMALL.ranks))


def play_options(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group, max_ranks=SMALL.ranks)
    batches = batches_of(3, {0: 6, 1: 4, 2: 5})
    batch = batches[buffer.rank]
    layout, worst = layout_of(buffer, batch), 40
    topk = {"topk_idx": batch.topk_idx, "topk_weights": batch.topk_weights}
    recv_x, idx, weights, counts, handle, _ = buffer.dispatch(batch.x, **layout, **topk, num_worst_tokens=worst)
    valid = expected(batches, buffer.rank, lambda b: b.x)
    assert torch.equal(recv_x[: len(valid)], valid)
    assert len(recv_x) == len(idx) == len(weights) == worst
    assert (idx[len(valid) :] == -1).all()
    assert counts == []
    combined, _, _ = buffer.combine(recv_x, handle)
    times = layout["is_token_in_rank"].sum(1, keepdim=True)
    assert torch.equal(combined, (batch.x.float() * times).to(torch.bfloat16))
    recv_x, idx, weights, counts, _, _ = buffer.dispatch(batch.x, **layout)
    assert (idx, weights) == (None, None)
    assert torch.equal(recv_x, valid)

    for kind, words, call in (
        (ValueError, "three tensors", lambda: buffer.dispatch(batch.x)),
        (TypeError, "x must be torch.bfloat16", lambda: buffer.dispatch(batch.x.float(), **layout)),
        (TypeError, "topk_idx must be a tensor", lambda: buffer.get_dispatch_layout(None, EXPERTS)),  # type: ignore[arg-type]
        (ValueError, "got 1 parts", lambda: buffer.dispatch((batch.x,), **layout)),  # type: ignore[arg-type]
        (TypeError, "with 6 parts, got tuple of 2", lambda: buffer.dispatch(batch.x, (1, 2))),  # type: ignore[arg-type]
        (TypeError, "with 6 parts, got NoneType", lambda: buffer.combine(recv_x, None)),  # type: ignore[arg-type]
        (ValueError, "go together", lambda: buffer.dispatch(batch.x, **layout, topk_idx=batch.topk_idx)),
        (ValueError, "goes where the first", lambda: buffer.dispatch(batch.x, handle, **topk)),
        (ValueError, "expert_alignment", lambda: buffer.dispatch(batch.x, **layout, expert_alignment=0)),
        (ValueError, "of the handle must be", lambda: buffer.dispatch(batch.x[:1], handle)),
        (ValueError, "scales must be", lambda: buffer.dispatch((quantized(batch.x)[0], torch.zeros(1)), **layout)),
        (ValueError, "x must be of shape", lambda: buffer.combine(recv_x[:0], handle)),
        (
            ValueError,
            "bias must be",
            lambda: buffer.combine(torch.zeros(worst, 256).bfloat16(), handle, bias=recv_x[:0]),
        ),
        (ValueError, "outside -1", lambda: buffer.get_dispatch_layout(batch.topk_idx + EXPERTS, EXPERTS)),
        (ValueError, "multiple of the number", lambda: buffer.get_dispatch_layout(batch.topk_idx, EXPERTS + 1)),
        (
            ValueError,
            "does not count",
            lambda: buffer.dispatch(batch.x, **{**layout, "num_tokens_per_rank": layout["num_tokens_per_rank"] + 1}),
        ),
    ):
        raises(kind, words, call)
    check_dispatch(buffer, batches, use_fp8=False, alignment=1)
    buffer.destroy()


def test_options_and_bad_arguments(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_options, SMALL.ranks))


def play_fork(group: dist.ProcessGroup, ends: str) -> None:
    buffer, batches = new_buffer(group), batches_of(1, dict.fromkeys(ACTIVE, SMALL.max_tokens))
    check_dispatch(buffer, batches, False, 1)
    if (child := os.fork()) == 0:
        status = 1
        try:
            if ends == "exit":
                atexit._run_exitfuncs()
            else:
                buffer.destroy()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert buffer.rendezvous.is_dir()
    check_dispatch(buffer, batches, False, 1)
    buffer.destroy()


@pytest.mark.parametrize("ends", ["exit", "destroy"])
def test_a_fork_that_ends_closes_nothing_of_its_parent(fleet: Fleet, ends: str) -> None:
    fleet.finish(fleet.start(play_fork, SMALL.ranks, ends))


def play_loses_a_rank(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group, max_ranks=SMALL.ranks, timeout_ms=3000)
    config = dataclasses.replace(SMALL, max_ranks=SMALL.ranks)
    step(buffer, config, 0, ACTIVE)
    batches = batches_of(4, {0: 6, 1: 4, 2: 5})
    batch = batches[buffer.rank]
    check_dispatch(buffer, batches, use_fp8=False, alignment=1)
    if buffer.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    layout = layout_of(buffer, batch)
    raises(eep.StepFailed, "rank 2", buffer.dispatch, batch.x, **layout)
    assert mask(buffer) == [0, 0, 1]
    buffer.low_latency_update_mask_buffer(2, True)
    recv_x, *_, handle, _ = buffer.dispatch(batch.x, **layout)
    left = {rank: batches[rank] for rank in (0, 1)}
    assert torch.equal(recv_x, expected(left, buffer.rank, lambda b: b.x))
    combined, _, _ = buffer.combine(recv_x, handle)
    times = layout["is_token_in_rank"][:, :2].sum(1, keepdim=True)
    assert torch.equal(combined, (batch.x.float() * times).to(torch.bfloat16))
    step(buffer, config, 5, (0, 1))
    buffer.destroy()


def test_a_lost_rank_ends_the_call_and_the_others_go_on_without_it(fleet: Fleet) -> None:
    numbers = fleet.start(play_loses_a_rank, SMALL.ranks)
    fleet.finish(numbers, dead=numbers[2:])


def test_a_rank_that_came_later_has_no_experts(rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"EEP_RENDEZVOUS": str(rendezvous.path), "EEP_RANK": "1", "EEP_WORLD_SIZE": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    buffer = Buffer(None, max_ranks=2)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(torch.zeros(1, 1, dtype=torch.int64), 2)
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    raises(eep.EepError, "was not there at the launch", buffer.dispatch, x, None, per_rank, None, in_rank, per_expert)
