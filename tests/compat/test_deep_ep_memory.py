"""The DeepEP interface: memory is there after the constructor, and a rank that fails early does not keep the others."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import eep
from eep.compat import deep_ep_rank, nixl_ep
from eep.compat.deep_ep import Buffer
from tests import moe
from tests.compat.deep_ep_ranks import SMALL, Fleet, dispatch, mask, new_buffer, raises, step

ACTIVE = tuple(range(SMALL.ranks))
EXPERTS = SMALL.ranks * SMALL.local_experts


def hint() -> int:
    return Buffer.get_low_latency_rdma_size_hint(SMALL.max_tokens, SMALL.hidden, SMALL.ranks, EXPERTS)


def hinted_buffer(group: dist.ProcessGroup, **options: Any) -> Buffer:
    return Buffer(group, num_rdma_bytes=hint(), low_latency_mode=True, explicitly_destroy=True, **options)


def play_constructor(group: dist.ProcessGroup) -> None:
    buffer = hinted_buffer(group, timeout_ms=60_000)
    made = buffer._inner
    buffer.barrier()
    step(buffer, dataclasses.replace(SMALL, max_ranks=SMALL.ranks), 0, ACTIVE)
    assert buffer._inner is made
    buffer.barrier()
    buffer.destroy()


def test_the_constructor_makes_the_memory_of_the_size_hint(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_constructor, SMALL.ranks))


def play_told_by_one(group: dist.ProcessGroup) -> None:
    told = torch.tensor(hint() if group.rank() == 0 else 0)
    dist.broadcast(told, 0)
    buffer = Buffer(group, 0, int(told), True, explicitly_destroy=True, timeout_ms=60_000)
    buffer.barrier()
    buffer.destroy()


def test_one_rank_may_ask_for_the_hint_and_tell_the_others(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_told_by_one, SMALL.ranks))


# Below, patience is longer than a test may take: who waits for a rank that is gone fails. Rank 0 may be the first to see
# that rank 2 is gone, and end before rank 1 looks.


def play_dies_before_dispatch(group: dist.ProcessGroup) -> None:
    buffer = hinted_buffer(group, timeout_ms=3000)
    deep_ep_rank.PATIENCE_S = 10_000
    if buffer.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    batch = moe.make_batch(SMALL, buffer.rank, 1, ACTIVE)
    dispatch(buffer, SMALL, batch)
    assert mask(buffer) == [0, 0, 1]


def test_a_rank_that_dies_before_the_first_dispatch_is_masked(fleet: Fleet) -> None:
    numbers = fleet.start(play_dies_before_dispatch, SMALL.ranks)
    fleet.finish(numbers, dead=numbers[2:])


def play_fails_in_constructor(group: dist.ProcessGroup, kills: bool) -> None:
    deep_ep_rank.PATIENCE_S = 10_000

    def fail(*_: Any, **__: Any) -> NoReturn:
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError("no memory for a test")

    if group.rank() == 2:
        deep_ep_rank.eep.Buffer = fail  # type: ignore[misc,assignment]
        raises(MemoryError, "for a test", hinted_buffer, group)
    else:
        with pytest.raises(eep.PeerUnreachable, match="ended or failed") as error:
            hinted_buffer(group)
        # One that has ended because of rank 2 may be seen before it.
        assert error.value.ranks
        assert group.rank() not in error.value.ranks
    dist.barrier()


def test_a_rank_that_fails_in_the_constructor_ends_those_of_the_others(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_fails_in_constructor, SMALL.ranks, False))


def play_dies_in_constructor(group: dist.ProcessGroup) -> None:
    if group.rank() == 2:
        play_fails_in_constructor(group, True)
    deep_ep_rank.PATIENCE_S = 10_000
    raises(eep.PeerUnreachable, "ended or failed", hinted_buffer, group)


def test_a_rank_that_dies_in_the_constructor_ends_those_of_the_others(fleet: Fleet) -> None:
    numbers = fleet.start(play_dies_in_constructor, SMALL.ranks)
    fleet.finish(numbers, dead=numbers[2:])


def play_dies_while_they_meet(group: dist.ProcessGroup) -> None:
    deep_ep_rank.PATIENCE_S = 10_000
    if group.rank() == 2:
        deep_ep_rank.DeepEpRank._meet = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    raises(eep.EepError, "no answer from rank|ended or failed", hinted_buffer, group)


def test_a_rank_that_dies_while_the_ranks_meet_ends_the_barrier(fleet: Fleet) -> None:
    numbers = fleet.start(play_dies_while_they_meet, SMALL.ranks)
    fleet.finish(numbers, dead=numbers[2:])


def play_gone_before_barrier(group: dist.ProcessGroup, dies: bool) -> None:
    buffer = hinted_buffer(group, timeout_ms=60_000)
    deep_ep_rank.PATIENCE_S = 10_000
    if buffer.rank == 2:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        buffer.destroy()
        return
    raises(eep.StepFailed, "rank 2", buffer.barrier)
    assert mask(buffer) == [0, 0, 1]
    buffer.low_latency_update_mask_buffer(2, True)
    buffer.barrier()
    buffer.destroy()


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_is_gone_ends_a_barrier(fleet: Fleet, dies: bool) -> None:
    numbers = fleet.start(play_gone_before_barrier, SMALL.ranks, dies)
    fleet.finish(numbers, dead=numbers[2:] if dies else ())


def play_dies_without_hint(group: dist.ProcessGroup) -> None:
    buffer = new_buffer(group)
    deep_ep_rank.PATIENCE_S = 10_000
    if buffer.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    batch = moe.make_batch(SMALL, buffer.rank, 1, ACTIVE)
    raises(eep.PeerUnreachable, "ended or failed", dispatch, buffer, SMALL, batch)


def test_a_dead_rank_ends_the_first_dispatch_where_memory_comes_with_it(fleet: Fleet) -> None:
    numbers = fleet.start(play_dies_without_hint, SMALL.ranks)
    fleet.finish(numbers, dead=numbers[2:])


def play_different_hints(group: dist.ProcessGroup) -> None:
    tokens = SMALL.max_tokens + group.rank()
    different = Buffer.get_low_latency_rdma_size_hint(tokens, SMALL.hidden, SMALL.ranks, EXPERTS)
    raises(ValueError, "different sizes", Buffer, group, 0, different, True)


def test_different_hints_raise_at_every_rank(fleet: Fleet) -> None:
    fleet.finish(fleet.start(play_different_hints, SMALL.ranks))


def test_the_environment_gives_the_timeout(rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"EEP_RENDEZVOUS": str(rendezvous.path), "EEP_RANK": "0", "EEP_WORLD_SIZE": "1"}
    for name, value in {**place, "EEP_TIMEOUT_MS": "2500"}.items():
        monkeypatch.setenv(name, value)
    assert Buffer(None)._timeout_ms == 2500
    assert Buffer(None, timeout_ms=70)._timeout_ms == 70
    monkeypatch.setenv("EEP_TIMEOUT_MS", "soon")
    with pytest.raises(ValueError, match="EEP_TIMEOUT_MS must be a number"):
        Buffer(None)


def play_shares_gpu(group: dist.ProcessGroup, is_shared: bool) -> None:
    hinted = Buffer.get_low_latency_rdma_size_hint(SMALL.max_tokens, SMALL.hidden, 1, SMALL.local_experts)
    for given, wanted in ((None, is_shared), (True, True), (False, False)):
        buffer = Buffer(group, 0, hinted, True, explicitly_destroy=True, shares_gpu=given)
        assert buffer._connected().shares_gpu is wanted
        buffer.destroy()
    theirs = nixl_ep.Buffer(group=group, explicitly_destroy=True)
    theirs.update_memory_buffers(1, SMALL.local_experts, hinted)
    assert theirs._rank()._connected().shares_gpu is is_shared
    theirs.destroy()


@pytest.mark.parametrize("environment", [{}, {"EEP_SHARES_GPU": "1"}])
def test_the_environment_says_that_ranks_share_a_gpu(fleet: Fleet, environment: dict[str, str]) -> None:
    fleet.finish(fleet.start(play_shares_gpu, 1, bool(environment), **environment))


def test_a_word_for_sharing_that_is_neither_yes_nor_no(
    rendezvous: eep.Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"EEP_RENDEZVOUS": str(rendezvous.path), "EEP_RANK": "0", "EEP_WORLD_SIZE": "1"}
    for name, value in {**place, "EEP_SHARES_GPU": "yes"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="EEP_SHARES_GPU must be 1"):
        Buffer(None)
