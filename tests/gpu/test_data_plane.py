"""Dispatch and combine on CUDA tensors between processes that share a GPU, against the reference, bit for bit."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

import eep
from tests import moe
from tests.ranks import Ranks

ALL, VICTIM, SURVIVORS = (0, 1, 2, 3), 2, (0, 1, 3)
CONFIG = moe.Config(ranks=4, max_ranks=4, device="cuda")


def start(group: Ranks, ranks: tuple[int, ...] = ALL) -> Ranks:
    group.start(ranks)
    group.connect(ranks)
    return group


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("wire", ["f32", "bf16", "fp8", "fp8_pow2", "fp8_ue8m0"])
@pytest.mark.parametrize("hidden", [512, 7168, 2560])
def test_matches_the_reference(rendezvous: eep.Rendezvous, layout: str, wire: str, hidden: int) -> None:
    config = dataclasses.replace(CONFIG, layout=layout, wire=wire, hidden=hidden, topk=6, max_tokens=40, max_ranks=5)
    with Ranks(rendezvous, config) as group:
        start(group).check_steps(ALL, seed=11, count=4)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
@pytest.mark.parametrize(("hidden", "max_tokens"), [(7168, 40), (128, 300), (640, 7)])
def test_outputs_travel_as_fp8(
    rendezvous: eep.Rendezvous, layout: str, wire: str, hidden: int, max_tokens: int
) -> None:
    config = dataclasses.replace(
        CONFIG, layout=layout, wire=wire, combine="fp8", hidden=hidden, topk=6, max_tokens=max_tokens, max_ranks=5
    )
    with Ranks(rendezvous, config) as group:
        start(group).check_steps(ALL, seed=12, count=4)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 3, 16, 32, 33])
def test_few_tokens(rendezvous: eep.Rendezvous, max_tokens: int, overlaps: bool) -> None:
    """Blocks share tokens in various ways, and kernels are of various sizes; with and without overlapping."""
    config = dataclasses.replace(CONFIG, hidden=2560, topk=6, max_tokens=max_tokens, overlaps=overlaps)
    with Ranks(rendezvous, config) as group:
        start(group).check_steps(ALL, seed=4, count=12)


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize(("room", "layout"), [(10, "rank"), (1024, "rank"), (1024, "expert")])
def test_few_tokens_in_a_buffer_with_room(rendezvous: eep.Rendezvous, room: int, layout: str, ranks: int) -> None:
    """Metadata is cleared before the rows are sent where there is little of it, and after that where there is much."""
    everyone = tuple(range(ranks))
    config = dataclasses.replace(
        CONFIG,
        ranks=ranks,
        max_ranks=ranks,
        hidden=7168,
        topk=5,
        max_tokens=9,
        local_experts=6,
        layout=layout,
        room=room,
    )
    with Ranks(rendezvous, config) as group:
        start(group, everyone).check_steps(everyone, seed=14, count=10)


def test_odd_sizes(rendezvous: eep.Rendezvous) -> None:
    config = dataclasses.replace(CONFIG, hidden=1048, topk=16, max_tokens=7, local_experts=5)
    with Ranks(rendezvous, config) as group:
        start(group).check_steps(ALL, seed=3, count=10)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_the_largest_sizes(rendezvous: eep.Rendezvous, layout: str) -> None:
    """Room for 64 ranks, of which two are there, 1024 tokens and top-16."""
    ends = (3, 63)
    config = dataclasses.replace(CONFIG, layout=layout, max_ranks=64, max_tokens=1024, topk=16, local_experts=12)
    with Ranks(rendezvous, config) as group:
        start(group, ends).check_steps(ends, seed=5, count=2)


def test_two_and_eight_ranks(rendezvous: eep.Rendezvous) -> None:
    config = dataclasses.replace(CONFIG, max_ranks=8, hidden=2048, topk=8, max_tokens=64, local_experts=32)
    with Ranks(rendezvous, config) as group:
        group.start(range(8))
        group.connect(range(8))
        group.check_steps(range(8), seed=1, count=5)


def test_a_killed_rank_is_dropped_and_replaced(rendezvous: eep.Rendezvous) -> None:
    """SIGKILL in the middle of the exchange, whenever; what survivors trust is exact; a replacement joins."""
    dice = random.Random(1)
    with Ranks(rendezvous, CONFIG, timeout_ms=1000) as group:
        start(group)
        for cycle, victim in enumerate([2, 0, 3]):
            survivors = tuple(rank for rank in ALL if rank != victim)
            group.begin(ALL, "step", 100 * cycle, ALL, 100_000)
            time.sleep(dice.uniform(0.0, 0.4))  # not a wait for anything: the moment is what the dice are for
            group[victim].kill()
            for rank in survivors:
                outputs, status = group[rank].answer()
                assert victim in status.suspects
                group.check_outputs(rank, outputs[:20], 100 * cycle, ALL)
            group.all(survivors, "disconnect", [victim])
            group.check_steps(survivors, seed=7)
            group.replace(victim, survivors)
            group.check_steps(ALL, seed=8)


def test_a_revoke_from_outside_frees_a_spinning_kernel(rendezvous: eep.Rendezvous) -> None:
    with Ranks(rendezvous, CONFIG, timeout_ms=900_000) as group:
        start(group)
        before = group[3].call("signals_of", (0, 1))
        for rank in (0, 1):
            group[rank].send("step", 1, ALL)
        group[3].call("wait_for_signals", before)
        group[3].call("revoke")
        for rank in (0, 1):
            outputs, status = group[rank].answer()
            assert status.revoked
            assert not outputs
        group.all(ALL, "connect", list(ALL), epoch=2)
        group.check_steps(ALL, seed=9)


@pytest.mark.parametrize("sign", ["barrier", "step"])
def test_a_barrier_of_a_view_that_the_others_left_ends_at_once(rendezvous: eep.Rendezvous, sign: str) -> None:
    """Nothing is revoked: it is the flags of the others, of whatever kind, that tell. No rank is suspected."""
    arguments = (1, ALL) if sign == "step" else ()
    with Ranks(rendezvous, CONFIG, timeout_ms=900_000) as group:
        start(group)
        group.all(SURVIVORS, "connect", [])
        for rank in SURVIVORS:
            group[rank].send(sign, *arguments)
        with pytest.raises(eep.EpochRevoked):
            group[VICTIM].call("barrier")
        assert not group[VICTIM].call("status").suspects
        group[VICTIM].call("connect", [])
        group[VICTIM].call(sign, *arguments)
        for rank in SURVIVORS:
            group[rank].answer()
        group.all(ALL, "barrier")
        group.check_steps(ALL, seed=2)


def test_a_stopped_rank_that_wakes_up_reaches_no_rank(rendezvous: eep.Rendezvous) -> None:
    # A fifth rank's worth of room: when it wakes up, its kernels too spin on the GPU that all share.
    with Ranks(rendezvous, dataclasses.replace(CONFIG, max_ranks=5), timeout_ms=1000) as group:
        start(group)
        group.begin(ALL, "step", 1, ALL, 100_000)
        zombie = group[VICTIM]
        zombie.stop()
        for rank in SURVIVORS:
            outputs, status = group[rank].answer()
            assert VICTIM in status.suspects
        group.all(SURVIVORS, "disconnect", [VICTIM])
        group.replace(VICTIM, SURVIVORS, incarnation=1)
        for rank in ALL:
            group[rank].send("step", 40, ALL, 300)
        zombie.resume()
        for rank in ALL:
            outputs, status = group[rank].answer()
            assert status.ok, f"rank {rank}: {status}"
            group.check_outputs(rank, outputs[:20], 40, ALL)
        assert not zombie.answer()[1].ok


def test_a_token_for_an_expert_outside_the_view_is_noticed(rendezvous: eep.Rendezvous) -> None:
    with Ranks(rendezvous, CONFIG) as group:
        start(group)
        group.all(SURVIVORS, "disconnect", [VICTIM])
        for _, status in group.all(SURVIVORS, "step", 1, ALL).values():
            assert status.misrouted


@pytest.mark.parametrize(("field", "value"), [("region", 0), ("slot", 4_000_000)])
def test_a_table_that_was_scribbled_over_costs_a_peer(rendezvous: eep.Rendezvous, field: str, value: int) -> None:
    with Ranks(rendezvous, CONFIG, timeout_ms=1000) as group:
        start(group)
        group[0].call("scribble_table", VICTIM, field, value)
        for rank in ALL:
            group[rank].send("step", 1, ALL)
        assert group[0].answer()[1].bad_table
        assert not group[VICTIM].answer()[1].ok
