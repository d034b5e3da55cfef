"""The DeepEP interface, in real processes: results bit for bit, hooks, two in flight, sizes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

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


def play_values(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group)
    all_ranks = tuple(range(SMALL.ranks))
    assert mask(buffer) == [0, 0, 0, 1]
    for seed, wire in enumerate(WIRES):
        config = with_wire(SMALL, wire)
        step(buffer, config, seed, all_ranks)
        step(buffer, config, seed + 10, all_ranks, {0: 0, 1: SMALL.max_tokens})
        step(buffer, config, seed + 20, all_ranks, {0: 0, 1: 0, 2: 0})
    # Another K, then other sizes, then the first ones again.
    step(buffer, dataclasses.replace(SMALL, topk=6), 30, all_ranks)
    larger = dataclasses.replace(SMALL, max_tokens=9, local_experts=3, hidden=128, topk=8)
    step(buffer, larger, 31, all_ranks, {0: 9})
    step(buffer, with_wire(larger, "fp8"), 32, all_ranks)
    batch = moe.make_batch(larger, buffer.rank, 0, all_ranks)
    raises(ValueError, "multiple of 512", dispatch, buffer, larger, batch, **WIRES["fp8_ue8m0"])
    step(buffer, SMALL, 33, all_ranks)
    buffer.barrier()
    buffer.destroy()


def test_values_in_every_format(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_values, SMALL.ranks))


def play_in_flight(group: dist.ProcessGroup) -> None:
    buffer, config = new_buffer(group), SMALL
    active = tuple(range(config.ranks))
    raises(eep.EepError, "clean_low_latency_buffer", buffer.barrier)
    buffer.clean_low_latency_buffer(config.max_tokens, config.hidden, config.ranks * config.local_experts)
    buffer.clean_low_latency_buffer(config.max_tokens, config.hidden, config.ranks * config.local_experts)

    for round in range(3):
        batches = [{r: moe.make_batch(config, r, 2 * round + i, active) for r in active} for i in range(2)]
        mine = [batch[buffer.rank] for batch in batches]
        stats = torch.zeros(config.local_experts, dtype=torch.int32)
        flights = [
            dispatch(
                buffer,
                config,
                batch,
                use_fp8=False,
                return_recv_hook=True,
                cumulative_local_expert_recv_stats=stats,
            )
            for batch in mine
        ]
        assert not stats.any()
        order = (0, 1) if round else (1, 0)
        for i in order:
            recv_x, count, handle, _, hook = flights[i]
            raises(eep.EepError, "out of turn", combine_of(buffer, mine[i], handle), recv_x)
            hook()
            raises(eep.EepError, "out of turn", hook)
        assert torch.equal(stats, flights[0][1] + flights[1][1])
        hooks = []
        for i in order:
            recv_x, count, handle, _, _ = flights[i]
            check_received(buffer, config, batches[i], recv_x, count, handle)
            output = run_experts(buffer, config, recv_x, count)
            out = torch.zeros(len(mine[i].x), config.hidden, dtype=torch.bfloat16)
            options: dict[str, Any] = {"out": out, "return_recv_hook": True, "use_logfmt": i > 0}
            if i == 0:  # the outputs are written where combine takes them from
                buffer.get_next_low_latency_combine_buffer(handle).copy_(output)
                options, output = {**options, "zero_copy": True}, torch.zeros_like(output)
            combined, _, hook = combine_of(buffer, mine[i], handle)(output, **options)
            assert combined is out
            hooks.append((i, hook, combined))
        for i, hook, combined in hooks:
            hook()
            assert torch.equal(combined, moe.reference(config, mine[i]))
            raises(eep.EepError, "out of turn", hook)
    buffer.barrier()
    buffer.destroy()


def test_hooks_and_two_in_flight(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_in_flight, SMALL.ranks))


def play_result_kept(group: dist.ProcessGroup) -> None:
    buffer, config = new_buffer(group), SMALL
    mine = [moe.make_batch(config, buffer.rank, seed, tuple(range(config.ranks))) for seed in (4, 5)]
    first = dispatch(buffer, config, mine[0], use_fp8=False)
    kept = [tensor.clone() for tensor in (first[0], first[1], *first[2][:2])]
    combine_of(buffer, mine[0], first[2])(run_experts(buffer, config, first[0], first[1]))
    second = dispatch(buffer, config, mine[1], use_fp8=False)
    for tensor, copy in zip((first[0], first[1], *first[2][:2]), kept, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
    combine_of(buffer, mine[1], second[2])(second[0])
    buffer.barrier()
    buffer.destroy()


def test_the_next_dispatch_leaves_the_last_result_alone(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_result_kept, SMALL.ranks))


# ---- alone ----


def test_size_hint_is_what_a_buffer_takes(rendezvous: eep.Rendezvous) -> None:
    hint = Buffer.get_low_latency_rdma_size_hint(8, 512, 4, 16)
    config = moe.Config(max_ranks=4, max_tokens=8, hidden=512, topk=16, local_experts=4, layout="expert")
    with config.buffer(0, rendezvous, channels=2) as buffer:
        assert os.fstat(buffer.region.fd).st_size == hint
    with pytest.raises(ValueError, match="multiple of the number of ranks, 4"):
        Buffer.get_low_latency_rdma_size_hint(8, 512, 4, 15)
    with pytest.raises(ValueError, match="max_tokens"):
        Buffer.get_low_latency_rdma_size_hint(0, 512, 4, 16)


def test_a_joining_process_needs_its_numbers(rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EEP_RENDEZVOUS", str(rendezvous.path))
    monkeypatch.setenv("EEP_RANK", "1")
    with pytest.raises(ValueError, match="EEP_WORLD_SIZE"):
        Buffer(None)
    monkeypatch.setenv("EEP_WORLD_SIZE", "2")
    monkeypatch.setenv("EEP_RANK", "one")
    with pytest.raises(ValueError, match="EEP_RANK"):
        Buffer(None)
    monkeypatch.setenv("EEP_RANK", "2")
    with pytest.raises(ValueError, match="too few"):
        Buffer(None)
