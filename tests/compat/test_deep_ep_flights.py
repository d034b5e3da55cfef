"""The DeepEP interface: handles that are combined twice, dispatches that are never combined, and DeepEP's failing ranks."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

import eep
from eep.compat.deep_ep import Buffer
from tests import moe
from tests.compat.deep_ep_ranks import (
    SMALL,
    WIRES,
    Fleet,
    check_received,
    combine_of,
    dispatch,
    mask,
    new_buffer,
    raises,
    run_experts,
    step,
    with_wire,
)

ACTIVE = tuple(range(SMALL.ranks))


def batches_of(seed: int) -> dict[int, moe.Batch]:
    return {rank: moe.make_batch(SMALL, rank, seed, ACTIVE) for rank in ACTIVE}


def play_twice(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group)
    for seed, wire in enumerate(WIRES):
        config = with_wire(SMALL, wire)
        batches = batches_of(seed)
        batch = batches[buffer.rank]
        recv_x, count, handle, _, _ = dispatch(buffer, config, batch, **WIRES[wire])
        output = run_experts(buffer, config, recv_x, count)
        combine = combine_of(buffer, batch, handle)
        assert torch.equal(combine(output)[0], moe.reference(config, batch))
        # Again, from where combine takes its outputs; then with other weights, by a hook, and of some experts only.
        buffer.get_next_low_latency_combine_buffer(handle).copy_(output)
        assert torch.equal(combine(torch.zeros_like(output), zero_copy=True)[0], moe.reference(config, batch))
        some = torch.where(torch.arange(config.topk) == 1, batch.topk_idx, -1)
        other = moe.Batch(batch.x, some, batch.topk_weights * 2)
        combined, _, hook = buffer.low_latency_combine(
            output, other.topk_idx, other.topk_weights, handle, return_recv_hook=True
        )
        raises(eep.EepError, "call its hook", combine, output)
        hook()
        assert torch.equal(combined, moe.reference(config, other))
        check_received(buffer, config, batches, recv_x, count, handle)
    assert mask(buffer) == [0, 0, 0, 1]
    buffer.barrier()
    buffer.destroy()


def test_a_handle_may_be_combined_again(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_twice, SMALL.ranks))


def play_never(group: dist.ProcessGroup) -> None:
    buffer, handles = new_buffer(group), []
    for seed in range(5):
        batches = batches_of(seed)
        recv_x, count, handle, _, hook = dispatch(
            buffer, SMALL, batches[buffer.rank], use_fp8=False, return_recv_hook=seed > 2
        )
        if seed == 4:  # that of seed 3 was never even received
            hook()
        if seed != 3:
            check_received(buffer, SMALL, batches, recv_x, count, handle)
        handles.append((batches[buffer.rank], handle, recv_x, hook))
    batch, handle, recv_x, hook = handles[2]
    raises(eep.EepError, "a later dispatch took its place", combine_of(buffer, batch, handle), recv_x)
    for number in (4, 3):  # the last two can still be combined
        batch, handle, recv_x, hook = handles[number]
        if number == 3:
            hook()
        output = run_experts(buffer, SMALL, recv_x, buffer._flights.find(handle[0]).tokens.expert_counts)
        combined, _, _ = combine_of(buffer, batch, handle)(output)
        assert torch.equal(combined, moe.reference(SMALL, batch))
    step(buffer, SMALL, 6, ACTIVE)
    dispatch(buffer, SMALL, batch)
    step(buffer, dataclasses.replace(SMALL, max_tokens=7), 7, ACTIVE)  # nor does it stand in the way of other sizes
    buffer.barrier()
    buffer.destroy()


def test_dispatches_need_not_be_combined(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_never, SMALL.ranks))


def play_one_waits(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group)
    batch = batches_of(0)[buffer.rank]
    recv_x, count, handle, _, _ = dispatch(buffer, SMALL, batch, use_fp8=False)
    output = run_experts(buffer, SMALL, recv_x, count)
    for seed in range(1, 4):
        step(buffer, SMALL, seed, ACTIVE)
    combined, _, _ = combine_of(buffer, batch, handle)(output)
    assert torch.equal(combined, moe.reference(SMALL, batch))
    buffer.barrier()
    buffer.destroy()


def test_a_dispatch_waits_for_its_combine_while_others_come_and_go(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_one_waits, SMALL.ranks))


def play_bad_dispatch(group: dist.ProcessGroup) -> None:
    buffer, flights = new_buffer(group), []
    for seed in range(2):
        batch = batches_of(seed)[buffer.rank]
        flights.append((batch, *dispatch(buffer, SMALL, batch, use_fp8=False)[:3]))
    bad = dataclasses.replace(batch, topk_idx=torch.full((len(batch.x), SMALL.topk), -2))
    if len(batch.x):
        raises(ValueError, "expert slots go from", dispatch, buffer, SMALL, bad)
    else:
        raises(ValueError, "top-k", dispatch, buffer, SMALL, dataclasses.replace(bad, topk_idx=bad.topk_idx[:, :0]))
    for batch, recv_x, count, handle in flights:
        combined, _, _ = combine_of(buffer, batch, handle)(run_experts(buffer, SMALL, recv_x, count))
        assert torch.equal(combined, moe.reference(SMALL, batch))
    buffer.barrier()
    buffer.destroy()


def test_a_refused_dispatch_takes_the_place_of_none(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_bad_dispatch, SMALL.ranks))


def play_gone_between(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group, timeout_ms=4000)
    batch = moe.make_batch(SMALL, buffer.rank, 3, ACTIVE, SMALL.max_tokens)
    recv_x, count, handle, _, _ = dispatch(buffer, SMALL, batch, use_fp8=False)
    output = run_experts(buffer, SMALL, recv_x, count)
    combine_of(buffer, batch, handle)(output)
    if buffer.rank != 0:  # the rows of all the others move
        combined, _, _ = combine_of(buffer, batch, handle)(output)
        assert mask(buffer) == [1, 0, 0, 1]
        without_it = torch.where(batch.topk_idx // SMALL.local_experts == 0, -1, batch.topk_idx)
        assert torch.equal(combined, moe.reference(SMALL, dataclasses.replace(batch, topk_idx=without_it)))
    dist.barrier()
    buffer.destroy()


def test_a_rank_may_be_lost_between_two_combines(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_gone_between, SMALL.ranks))


# ---- ranks that stop at one of the calls, as in DeepEP's own test ----

STOPS = {"dispatch": 1, "combine": 3, "clean": 5}
SHRINKING = moe.Config(ranks=6, max_ranks=6, max_tokens=6, hidden=512, topk=3, local_experts=2, layout="expert")


def play_shrinking(group: dist.ProcessGroup) -> None:
    config = SHRINKING
    everyone, experts = tuple(range(config.ranks)), config.ranks * config.local_experts
    hint = Buffer.get_low_latency_rdma_size_hint(config.max_tokens, config.hidden, config.ranks, experts)
    buffer = Buffer(group, 0, hint, True, explicitly_destroy=True, enable_shrink=True, timeout_ms=4000)
    gone: set[int] = set()
    batch = moe.make_batch(config, buffer.rank, 0, everyone, config.max_tokens)

    def stops_at(call: str) -> bool:
        gone.add(STOPS[call])
        return buffer.rank in gone

    def check_mask() -> None:
        assert {rank for rank, masked in enumerate(mask(buffer)) if masked} == gone

    for rounds in range(3):
        if stops_at("dispatch"):
            break
        for _ in range(1 + rounds % 2):
            recv_x, count, handle, _, _ = dispatch(buffer, config, batch, use_fp8=False)
        check_mask()
        output = run_experts(buffer, config, recv_x, count)
        if stops_at("combine"):
            break
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle).copy_(output)
            combined, _, _ = combine_of(buffer, batch, handle)(output, zero_copy=zero_copy)
            check_mask()
            owner = batch.topk_idx // config.local_experts
            left = torch.where(torch.isin(owner, torch.tensor(sorted(gone))), -1, batch.topk_idx)
            assert torch.equal(combined, moe.reference(config, dataclasses.replace(batch, topk_idx=left)))
        if stops_at("clean"):
            break
        buffer.clean_low_latency_buffer(config.max_tokens, config.hidden, experts)
        check_mask()
    dist.barrier()
    buffer.destroy()


def test_ranks_that_stop_are_masked_and_the_others_go_on(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_shrinking, SHRINKING.ranks))
