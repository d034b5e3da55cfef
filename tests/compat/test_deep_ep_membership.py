"""The DeepEP interface: a rank dies and its successor joins, as does a rank that was not there at the launch."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
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


def play_survivor(group: dist.ProcessGroup) -> None:
    buffer, config = new_buffer(group), SMALL
    step(buffer, config, 0, (0, 1, 2))
    if buffer.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    # Its tokens are absent, and so is what its experts would have added.
    batches = {rank: moe.make_batch(config, rank, 1, (0, 1, 2)) for rank in (0, 1)}
    batch = batches[buffer.rank]
    patience, buffer._inner.timeout_ms = buffer._inner.timeout_ms, 3000  # a rank is missed only here
    recv_x, count, handle, _, _ = dispatch(buffer, config, batch, use_fp8=False)
    buffer._inner.timeout_ms = patience
    assert mask(buffer) == [0, 0, 1, 1]
    check_received(buffer, config, batches, recv_x, count, handle)
    combined, _, _ = combine_of(buffer, batch, handle)(run_experts(buffer, config, recv_x, count))
    without_it = torch.where(batch.topk_idx // config.local_experts == 2, -1, batch.topk_idx)
    expected = moe.reference(config, moe.Batch(batch.x, without_it, batch.topk_weights))
    assert torch.equal(combined, expected)

    buffer.low_latency_clean_mask_buffer()
    assert mask(buffer) == [0, 0, 0, 1]
    buffer.low_latency_update_mask_buffer(2, True)
    assert mask(buffer) == [0, 0, 1, 1]
    buffer.barrier()
    step(buffer, config, 2, (0, 1))
    # A token may still name experts of a masked rank; they add nothing.
    recv_x, count, handle, _, _ = dispatch(buffer, config, batch, use_fp8=False)
    check_received(buffer, config, batches, recv_x, count, handle)
    combined, _, _ = combine_of(buffer, batch, handle)(run_experts(buffer, config, recv_x, count))
    assert torch.equal(combined, expected)

    buffer.connect_ranks([2])
    play_together(buffer)


def play_joiner(group: dist.ProcessGroup, joins_alone: bool) -> None:
    buffer = new_buffer(None if joins_alone else group)
    assert buffer.group_size == 3
    buffer.connect_ranks([0, 1])  # as a program written for both would; it joins in its first dispatch
    play_together(buffer)


def play_together(buffer: Buffer) -> None:
    """From the return of rank 2 on; then rank 3 comes, which was not there at the launch."""
    config = SMALL
    if buffer.rank != 3:
        assert mask(buffer) == [0, 0, 0, 1]
        step(buffer, config, 3, (0, 1, 2))
        buffer.low_latency_update_mask_buffer(3, False)
    for seed, wire in enumerate(WIRES):
        step(buffer, with_wire(config, wire), 10 + seed, (0, 1, 2, 3))
    assert mask(buffer) == [0, 0, 0, 0]
    larger = dataclasses.replace(config, max_tokens=10)
    step(buffer, larger, 20, (0, 1, 2, 3))
    if buffer.rank != 3:
        buffer.disconnect_ranks([3])
        step(buffer, larger, 21, (0, 1, 2))
        buffer.barrier()
    buffer.destroy()


def test_survivors_go_on_and_replacements_join(fleet: Fleet, rendezvous: eep.Rendezvous) -> None:
    place = {"EEP_RENDEZVOUS": str(rendezvous.path)}
    first = fleet.start(play_survivor, 3, **place)
    fleet.finish(first[2:], dead=first[2:])
    joining = [
        number
        for rank in (2, 3)
        for number in fleet.start(play_joiner, 1, rank == 3, EEP_RANK=str(rank), EEP_WORLD_SIZE="3", **place)
    ]
    fleet.finish([*first[:2], *joining])


def play_host_of_a_joiner(group: dist.ProcessGroup) -> None:
    buffer = hinted(group)
    buffer.connect_ranks([3])
    buffer.barrier()
    step(buffer, SMALL, 1, (0, 1, 2, 3))
    buffer.barrier()
    buffer.destroy()


def play_joins_when_it_connects(group: dist.ProcessGroup) -> None:
    buffer = hinted(group)
    assert mask(buffer) == [0, 0, 0, 1]
    buffer.connect_ranks([0, 1, 2], activate=False)
    assert mask(buffer) == [0, 0, 0, 1]
    buffer.connect_ranks([0, 1, 2])
    assert mask(buffer) == [0, 0, 0, 0]
    buffer.barrier()
    step(buffer, SMALL, 1, (0, 1, 2, 3))
    buffer.barrier()
    buffer.destroy()


def hinted(group: dist.ProcessGroup) -> Buffer:
    experts = SMALL.ranks * SMALL.local_experts
    size = Buffer.get_low_latency_rdma_size_hint(SMALL.max_tokens, SMALL.hidden, SMALL.ranks, experts)
    options = {"max_ranks": SMALL.max_ranks, "timeout_ms": 60_000}
    return Buffer(group, 0, size, low_latency_mode=True, explicitly_destroy=True, **options)


def test_a_joiner_that_knows_its_sizes_joins_when_it_connects(fleet: Fleet, rendezvous: eep.Rendezvous) -> None:
    place = {"EEP_RENDEZVOUS": str(rendezvous.path)}
    members = fleet.start(play_host_of_a_joiner, 3, **place)
    joiner = fleet.start(play_joins_when_it_connects, 1, EEP_RANK="3", EEP_WORLD_SIZE="3", **place)
    fleet.finish([*members, *joiner])


def play_routes_to_masked(group: dist.ProcessGroup, says_so: bool) -> None:
    buffer, config = new_buffer(group, enable_shrink=says_so), SMALL
    step(buffer, config, 0, (0, 1, 2))
    if buffer.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.disconnect_ranks([2])
    batch = moe.make_batch(config, buffer.rank, 1, (0, 1, 2), config.max_tokens)
    assert (batch.topk_idx // config.local_experts == 2).any()
    for _ in range(2):
        recv_x, count, handle, _, _ = dispatch(buffer, config, batch, use_fp8=False)
        output = run_experts(buffer, config, recv_x, count)
        for _ in range(2):
            combined, _, _ = combine_of(buffer, batch, handle)(output)
            without_it = torch.where(batch.topk_idx // config.local_experts == 2, -1, batch.topk_idx)
            expected = moe.reference(config, moe.Batch(batch.x, without_it, batch.topk_weights))
            assert torch.equal(combined, expected)
    if says_so:
        buffer.barrier()
        bad = dataclasses.replace(batch, topk_idx=batch.topk_idx + 100)
        raises(ValueError, "expert slots go from", dispatch, buffer, config, bad)
        raises(ValueError, "did not send", combine_of(buffer, bad, handle), output)
    else:
        raises(eep.StepFailed, "outside the view", buffer.barrier)
    buffer.destroy()


@pytest.mark.parametrize("says_so", [True, False])
def test_tokens_for_a_masked_rank(fleet: Fleet, says_so: bool) -> None:
    numbers = fleet.start(play_routes_to_masked, 3, says_so)
    fleet.finish(numbers, dead=numbers[2:])
