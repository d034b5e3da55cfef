"""NIXL's interface in the phases of a plan: ranks start together, one is killed and comes back, one is added, one leaves."""

from __future__ import annotations

import datetime
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import eep
import eep.compat.nixl_ep as nixl_ep
from eep.compat import nixl_rank
from eep.compat.deep_ep import Buffer as DeepEpBuffer
from tests import moe
from tests.compat.deep_ep_ranks import Fleet, check_received, raises, run_experts

CAPACITY = 4
CONFIG = moe.Config(ranks=4, max_ranks=4, max_tokens=6, hidden=512, topk=3, local_experts=2, layout="expert")

PHASES = ([0, 1, 2], [0, 1], [0, 1, 2, 3], [0, 2, 3], [0, 1, 3])
"""The ranks of each phase. Rank 2 is killed in the first, and comes back in the third. In the last, one leaves as one
comes."""


def new_buffer(rank: int, store: Any, timeout_ms: float) -> nixl_ep.Buffer:
    hint = nixl_ep.Buffer.get_rdma_size_hint(
        CONFIG.max_tokens, CONFIG.hidden, CAPACITY, CAPACITY * CONFIG.local_experts
    )
    buffer = nixl_ep.Buffer(rank=rank, explicitly_destroy=True, tcp_store_group=store, timeout_ms=timeout_ms)
    buffer.update_memory_buffers(CAPACITY, CONFIG.local_experts, hint)
    return buffer


def mask(buffer: nixl_ep.Buffer) -> list[int]:
    status = torch.zeros(CAPACITY, dtype=torch.int32)
    buffer.query_mask_buffer(status)
    return [int(each) for each in status]


def step(buffer: nixl_ep.Buffer, seed: int, active: list[int]) -> None:
    """Tokens name experts of all ranks up to the last active one, as NIXL's test has it."""
    ranks = max(active) + 1
    batches = {rank: moe.make_batch(CONFIG, rank, seed, tuple(range(ranks))) for rank in active}
    batch, inner = batches[buffer.rank], buffer.runtime
    assert isinstance(inner, DeepEpBuffer)
    stats = torch.zeros(CONFIG.local_experts, dtype=torch.int32)
    recv_x, count, handle, event, hook = buffer.dispatch(
        batch.x,
        batch.topk_idx,
        CONFIG.max_tokens,
        ranks * CONFIG.local_experts,
        use_fp8=False,
        async_finish=True,
        cumulative_local_expert_recv_stats=stats,
    )
    event.current_stream_wait()
    assert torch.equal(stats, count)
    there = [rank for rank in active if not mask(buffer)[rank]]
    present: Any = {rank: batches[rank] for rank in there}
    sizes = (*handle[:4], CAPACITY * CONFIG.local_experts)
    check_received(inner, CONFIG, present, recv_x, count, sizes)
    output = run_experts(inner, CONFIG, recv_x, count)
    owner = batch.topk_idx // CONFIG.local_experts
    left = torch.where(torch.isin(owner, torch.tensor(there)), batch.topk_idx, -1)
    for zero_copy in (False, True):
        if zero_copy:
            buffer.get_next_combine_buffer(handle).copy_(output)
        combined, _, hook = buffer.combine(
            output, batch.topk_idx, batch.topk_weights, handle, zero_copy=zero_copy, return_recv_hook=True
        )
        assert hook is not None
        hook()
        assert torch.equal(combined, moe.reference(CONFIG, moe.Batch(batch.x, left, batch.topk_weights)))


def play_plan(group: dist.ProcessGroup, port: int, rank: int | None, first: int) -> None:
    rank = group.rank() if rank is None else rank
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    buffer = new_buffer(rank, store, timeout_ms=4000)
    connected: set[int] = set()
    for phase in range(first, len(PHASES)):
        active = PHASES[phase]
        gone = connected - {*active}
        if rank not in active:
            break
        if new := {*active} - connected:
            buffer.connect_ranks(sorted(new))
        if gone:
            buffer.disconnect_ranks(sorted(gone))
        connected = {*active}
        for seed in range(3):
            if phase == 0 and seed == 1 and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            step(buffer, 10 * phase + seed, active)
        if phase == 0:
            assert mask(buffer) == [0, 0, 1, 1]
            buffer.disconnect_ranks([2])
            connected -= {2}
        else:
            buffer.barrier()  # tokens for ranks that are not connected do not spoil the status
            assert mask(buffer) == [int(each not in active) for each in range(CAPACITY)]
    buffer.destroy()


def test_a_plan_of_phases(fleet: Fleet) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = fleet.start(play_plan, 3, store.port, None, 0)
    added = fleet.start(
        play_plan, 1, store.port, 3, 2
    )  # it is there from the start, and let in by the others in its phase
    fleet.finish(first[2:], dead=first[2:])
    back = fleet.start(play_plan, 1, store.port, 2, 2)
    fleet.finish(first[1:2])
    again = fleet.start(play_plan, 1, store.port, 1, 4)
    fleet.finish([*first[:1], *added, *back, *again])


def play_dies_before_dispatch(group: dist.ProcessGroup, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    buffer = new_buffer(group.rank(), store, timeout_ms=4000)
    buffer.connect_ranks(range(3))
    if group.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    step(buffer, 0, [0, 1, 2])
    assert mask(buffer) == [0, 0, 1, 1]
    buffer.disconnect_ranks([2])
    step(buffer, 1, [0, 1])
    buffer.barrier()
    buffer.destroy()


def test_a_rank_that_dies_before_its_first_dispatch_is_masked(fleet: Fleet) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    numbers = fleet.start(play_dies_before_dispatch, 3, store.port)
    fleet.finish(numbers, dead=numbers[2:])


def play_alone_first(group: dist.ProcessGroup, port: int) -> None:
    """A rank may work before it has peers: on its own experts."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    rank = group.rank()
    buffer = new_buffer(rank, store, timeout_ms=4000)
    alone = [int(each != rank) for each in range(CAPACITY)]
    if rank != 1:  # which has done nothing when it meets the others
        assert mask(buffer) == alone
        for seed in range(3):
            step(buffer, seed, [rank])
        buffer.disconnect_ranks([1])
        buffer.clean_mask_buffer()
        buffer.barrier()
        assert mask(buffer) == alone
    if rank != 2:
        buffer.connect_ranks([1 - rank])
        for seed in range(3):
            step(buffer, 10 + seed, [0, 1])
    group.barrier()
    buffer.connect_ranks([2] if rank != 2 else [0, 1])
    for seed in range(3):
        step(buffer, 20 + seed, [0, 1, 2])
    buffer.barrier()
    assert mask(buffer) == [0, 0, 0, 1]
    buffer.destroy()


def test_ranks_that_work_alone_connect_later(fleet: Fleet) -> None:
    """The first two begin with each other, the third is let in."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fleet.finish(fleet.start(play_alone_first, 3, store.port))


def play_reconnects(group: dist.ProcessGroup, port: int) -> None:
    """The same processes part and connect again."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    rank = group.rank()
    others = [each for each in range(3) if each != rank]
    buffer = new_buffer(rank, store, timeout_ms=20_000)
    for seed in range(3):
        buffer.connect_ranks(others)
        step(buffer, seed, [0, 1, 2])
        group.barrier()
        buffer.disconnect_ranks(others)
        assert mask(buffer) == [int(each != rank) for each in range(CAPACITY)]
        step(buffer, 10 + seed, [rank])
        group.barrier()
    buffer.connect_ranks(others)
    step(buffer, 20, [0, 1, 2])
    if rank != 2:
        buffer.update_mask_buffer(2, True)
        buffer.connect_ranks([2], activate=False)
        assert mask(buffer) == [0, 0, 1, 1]
        patience, nixl_rank.PATIENCE_S = nixl_rank.PATIENCE_S, 0.1
        raises(eep.PeerUnreachable, "still live as", buffer.connect_ranks, [2])
        nixl_rank.PATIENCE_S = patience
    group.barrier()
    if rank == 2:
        store.wait(["they are about to let it in again"])
        for other in others:
            buffer.update_mask_buffer(other, True)
        buffer.connect_ranks(others)
    else:
        step(buffer, 21, [0, 1])
        store.set("they are about to let it in again", "")
        buffer.update_mask_buffer(2, False)
    step(buffer, 22, [0, 1, 2])
    buffer.barrier()
    group.barrier()
    buffer.destroy()


def test_ranks_that_parted_connect_again(fleet: Fleet) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fleet.finish(fleet.start(play_reconnects, 3, store.port))


def play_parts_at_once(group: dist.ProcessGroup, port: int, slow: int) -> None:
    """Nothing lies between connect and disconnect, and one rank is slow to find out that it was let in."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    rank = group.rank()
    others = [each for each in range(3) if each != rank]
    buffer = new_buffer(rank, store, timeout_ms=20_000)
    nixl_rank.PATIENCE_S = 10.0
    join = eep.Buffer.join

    def join_late(inner: eep.Buffer, *, timeout: float = 30.0) -> eep.View:
        time.sleep(0.3)
        return join(inner, timeout=timeout)

    if rank == slow:
        eep.Buffer.join = join_late  # type: ignore[method-assign]
    for _ in range(4):
        buffer.connect_ranks(others)
        buffer.disconnect_ranks(others)
    buffer.connect_ranks(others)
    step(buffer, 20, [0, 1, 2])
    buffer.barrier()
    assert mask(buffer) == [0, 0, 0, 1]
    buffer.destroy()


@pytest.mark.parametrize("slow", [0, 2])
def test_ranks_that_part_as_soon_as_they_are_connected_leave_no_rank_waiting(fleet: Fleet, slow: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fleet.finish(fleet.start(play_parts_at_once, 3, store.port, slow))


def test_memory_comes_first(rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = nixl_ep.Buffer(rank=0, explicitly_destroy=True)
    raises(eep.EepError, "update_memory_buffers first", buffer.connect_ranks, [1])
    raises(ValueError, "get_rdma_size_hint", buffer.update_memory_buffers, 2, 2, 1)
    hint = nixl_ep.Buffer.get_rdma_size_hint(6, 512, 2, 4)
    raises(ValueError, "tcp_store_group", buffer.update_memory_buffers, 2, 2, hint)
    monkeypatch.setenv("EEP_RENDEZVOUS", str(rendezvous.path))
    raises(ValueError, "num_ranks is 0, too few for rank 0", buffer.update_memory_buffers, 0, 2, hint)
    buffer.update_memory_buffers(2, 2, hint)
    raises(eep.EepError, "there already", buffer.update_memory_buffers, 2, 2, hint)
    raises(ValueError, "outside the capacity", buffer.connect_ranks, [2])
    raises(ValueError, "outside the capacity", buffer.disconnect_ranks, [2])
    raises(ValueError, "cannot disconnect itself", buffer.disconnect_ranks, [0])
    x, idx = torch.zeros(1, 512, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
    raises(ValueError, "made for 6 tokens of 512", buffer.dispatch, x, idx, 7, 4)
    _, count, *_ = buffer.dispatch(x, idx, 6, 4, use_fp8=False)
    assert count.tolist() == [1, 0]
    buffer.clean_buffer(6, 512, 4)
    buffer.destroy()
    buffer.destroy()
    assert buffer.runtime is None
    raises(eep.EepError, "explicitly_destroy", nixl_ep.Buffer().destroy)
