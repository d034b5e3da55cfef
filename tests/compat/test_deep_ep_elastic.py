"""DeepEP's ElasticBuffer, in real processes: every tensor compared with a plain computation over all ranks' tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import eep
from eep.compat.deep_ep import ElasticBuffer, EPHandle, EventHandle
from tests import moe
from tests.compat.deep_ep_ranks import SMALL, Fleet, raises

RANKS, LOCAL, MOST = SMALL.ranks, 3, 12
EXPERTS = RANKS * LOCAL
CONFIG = dataclasses.replace(SMALL, hidden=256, max_tokens=MOST, local_experts=LOCAL, topk=5)
FACTORS = torch.tensor([2.0**30, 3.0, -(2.0**30), 5.0, 2.0**30, 7.0, -(2.0**30), 11.0, 13.0])
"""By expert. What is added between two large numbers that cancel is lost, so a sum shows its order."""


def batches_of(seed: int) -> list[moe.Batch]:
    return [moe.make_batch(CONFIG, rank, seed, tuple(range(RANKS)), MOST - 3 * rank) for rank in range(RANKS)]


def goes_to(batch: moe.Batch, rank: int) -> torch.Tensor:
    return ((batch.topk_idx >= 0) & (batch.topk_idx // LOCAL == rank)).any(1).nonzero().squeeze(1)


def align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def outputs(x: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """bf16 ``[tokens, topk, hidden]``: every expert gives its row times its factor."""
    factor = torch.where(topk_idx >= 0, FACTORS[topk_idx], 0)
    return (x.unsqueeze(1) * factor.unsqueeze(2)).to(torch.bfloat16)


def in_order(values: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """``start``, and ``values`` ``[tokens, topk, hidden]`` one after the other, in fp32."""
    for k in range(values.shape[1]):
        start = start + values[:, k].float()
    return start.to(torch.bfloat16)


def sums(batch: moe.Batch, biases: list[torch.Tensor], *, reduces: bool = True) -> torch.Tensor:
    """What each rank gives, rounded, where the token's last choice on that rank stands; or every choice by itself."""
    values = outputs(batch.x, batch.topk_idx)
    start = torch.zeros(batch.x.shape)
    for bias in biases:
        start = start + bias.float()
    if reduces:
        by_slot = torch.zeros_like(values)
        for rank in range(RANKS):
            here = (batch.topk_idx >= 0) & (batch.topk_idx // LOCAL == rank)
            of_rank = in_order(torch.where(here.unsqueeze(2), values, 0), torch.zeros(batch.x.shape))
            for token in here.any(1).nonzero().squeeze(1):
                by_slot[token, here[token].nonzero().max()] = of_rank[token]
        values = by_slot
    return in_order(values, start)


def check_handle(buffer: ElasticBuffer, batches: list[moe.Batch], handle: EPHandle, alignment: int) -> None:
    me = buffer.rank_idx
    received = [len(goes_to(batch, me)) for batch in batches]
    numbers = [rank * MOST + int(token) for rank, batch in enumerate(batches) for token in goes_to(batch, me)]
    counts = [sum(int((batch.topk_idx == me * LOCAL + e).sum()) for batch in batches) for e in range(LOCAL)]
    aligned = [align(count, alignment) for count in counts]
    assert handle.num_recv_tokens == sum(received)
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == torch.tensor(received).cumsum(0).tolist()
    assert handle.recv_src_metadata[:, 0].tolist() == numbers
    assert handle.num_recv_tokens_per_expert_list == aligned
    begins = [sum(aligned[:e]) for e in range(LOCAL)]
    ends = [begins[e] + (counts[e] if handle.do_expand else aligned[e]) for e in range(LOCAL)]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends


def play_elastic(group: dist.ProcessGroup, alignment: int, use_fp8: bool, reduces: bool) -> None:
    buffer = ElasticBuffer(
        group,
        num_max_tokens_per_rank=MOST,
        hidden=256,
        num_topk=CONFIG.topk,
        allow_multiple_reduction=reduces,
        explicitly_destroy=True,
    )
    assert (buffer.num_ranks, buffer.get_logical_domain_size()) == (RANKS, (1, RANKS))
    me, batches = buffer.rank_idx, batches_of(alignment)
    batch = batches[me]
    x: Any = moe.quantize(batch.x, "fp8") if use_fp8 else batch.x
    rows_of = [batch.x[goes_to(batch, me)] for batch in batches]
    all_x = torch.cat(rows_of)
    all_idx = torch.cat([b.topk_idx[goes_to(b, me)] for b in batches])
    all_weights = torch.cat([b.topk_weights[goes_to(b, me)] for b in batches])
    here = (all_idx >= 0) & (all_idx // LOCAL == me)
    stats = torch.zeros(LOCAL, dtype=torch.int32)
    options: dict[str, Any] = {
        "num_experts": EXPERTS,
        "expert_alignment": alignment,
        "previous_event": buffer.capture(),
    }
    options |= {"topk_idx": batch.topk_idx, "topk_weights": batch.topk_weights}
    assert isinstance(options["previous_event"], EventHandle)

    def data_of(got: Any) -> torch.Tensor:
        return got[0].view(torch.uint8) if use_fp8 else got

    wanted = moe.quantize(all_x, "fp8")[0].view(torch.uint8) if use_fp8 else all_x
    got, idx, weights, handle, event = buffer.dispatch(x, cumulative_local_expert_recv_stats=stats, **options)
    event.current_stream_wait()
    assert torch.equal(data_of(got), wanted)
    assert torch.equal(idx, torch.where(here, all_idx % LOCAL, -1))
    assert torch.equal(weights, torch.where(here, all_weights, 0))
    assert torch.equal(stats, handle.num_unaligned_recv_tokens_per_expert)
    check_handle(buffer, batches, handle, alignment)
    again, again_idx, nothing, same, _ = buffer.dispatch(x, handle=handle)
    assert same is handle
    assert nothing is None
    assert torch.equal(data_of(again), wanted)
    assert torch.equal(again_idx, idx)

    spread, none, spread_weights, expanded, _ = buffer.dispatch(
        x, do_expand=True, use_tma_aligned_col_major_sf=True, do_handle_copy=False, **options
    )
    assert none is None
    assert expanded.topk_idx is batch.topk_idx
    check_handle(buffer, batches, expanded, alignment)
    slots = expanded.recv_src_metadata[:, 2:]
    assert torch.equal(slots >= 0, here)
    token, k = here.nonzero(as_tuple=True)
    rows = slots[token, k].long()
    assert torch.equal(data_of(spread)[rows], wanted[token])
    assert torch.equal(spread_weights[rows], all_weights[token, k])
    starts = torch.tensor([0, *handle.num_recv_tokens_per_expert_list]).cumsum(0)
    assert torch.equal(torch.searchsorted(starts, rows, right=True) - 1, (all_idx % LOCAL)[token, k])
    padding = torch.ones(len(spread_weights), dtype=torch.bool)
    padding[rows] = False
    assert not data_of(spread)[padding].any()
    if use_fp8:
        assert torch.equal(spread[1][rows], moe.quantize(all_x, "fp8")[1][token])
        assert spread[1].stride(0) == 1
        assert spread[1].stride(1) % 4 == 0
    cached, _, cached_weights, _, _ = buffer.dispatch(x, topk_weights=batch.topk_weights, handle=expanded)
    assert torch.equal(data_of(cached), data_of(spread))
    assert torch.equal(cached_weights, spread_weights)

    # Experts: on this side one output for each choice, or their sum.
    per_choice = outputs(all_x, torch.where(here, all_idx, -1))
    of_rank = in_order(per_choice, torch.zeros(all_x.shape))
    output = torch.full((len(spread_weights), 256), float("nan"), dtype=torch.bfloat16)
    output[rows] = per_choice[token, k]
    biases = [torch.ones_like(batch.x), batch.x]
    elsewhere = torch.where(here, weights, 7.0)  # what a rank says of the experts of others does not count
    for used in (0, 1, 2):
        bias: Any = None if not used else biases[0] if used == 1 else tuple(biases)
        for combined, combined_weights, sum_of in (
            (*buffer.combine(of_rank, handle, elsewhere, bias)[:2], sums(batch, biases[:used])),
            (
                *buffer.combine(output, expanded, spread_weights, bias)[:2],
                sums(batch, biases[:used], reduces=reduces),
            ),
        ):
            assert torch.equal(combined, sum_of)
            assert torch.equal(combined_weights, torch.where(batch.topk_idx >= 0, batch.topk_weights, 0))

    raises(ValueError, "needs topk_idx", buffer.dispatch, x)
    raises(ValueError, "goes where the first", buffer.dispatch, x, batch.topk_idx, handle=handle)
    raises(ValueError, "allows 1", buffer.dispatch, x, **{**options, "num_max_tokens_per_rank": 1})
    raises(ValueError, "x must be of shape", buffer.combine, output[:-1], expanded)
    raises(ValueError, "expert_alignment is 0", buffer.dispatch, x, **{**options, "expert_alignment": 0})
    too_few = {"cumulative_local_expert_recv_stats": torch.zeros(1, dtype=torch.int32)}
    raises(ValueError, "recv_stats must be of shape", buffer.dispatch, x, **{**options, **too_few})
    raises(ValueError, "recv_stats must be of shape", buffer.dispatch, x, handle=handle, **too_few)
    raises(TypeError, "x must be a tensor", buffer.dispatch, None, **options)
    raises(TypeError, "must be the EPHandle", buffer.dispatch, x, handle=(1, 2))
    raises(TypeError, "must be the EPHandle", buffer.combine, output, None)
    raises(eep.EepError, "engram_write is not there", getattr, buffer, "engram_write")
    raises(AttributeError, "no attribute 'another'", getattr, buffer, "another")
    buffer.barrier()
    buffer.destroy()
    raises(eep.EepError, "destroyed", buffer.barrier)


@pytest.mark.parametrize(("alignment", "use_fp8", "reduces"), [(1, False, True), (4, True, False)])
def test_tokens_and_sums(fleet: Fleet, alignment: int, use_fp8: bool, reduces: bool) -> None:
    fleet.finish(fleet.start(play_elastic, RANKS, alignment, use_fp8, reduces))


def test_the_sums_show_their_order() -> None:
    batch = batches_of(1)[0]
    assert not torch.equal(sums(batch, []), sums(batch, [], reduces=False))
    turned = moe.Batch(batch.x, batch.topk_idx.flip(1), batch.topk_weights)
    assert not torch.equal(sums(batch, []), sums(turned, []))
