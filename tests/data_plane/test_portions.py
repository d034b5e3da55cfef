"""Batches that the buffers have no room for cross ranks in portions: real ranks, exact to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import eep
from eep.data_plane.passage import Passage, count_portions
from tests import moe
from tests.data_plane.test_dispatch_combine import on_threads
from tests.ranks import DIED, Ranks

ALL, VICTIM, SURVIVORS = (0, 1, 2, 3), 2, (0, 1, 3)
SOON_MS, PATIENT_MS = 3000.0, 60_000.0
"""How long a rank waits where a peer is missed for certain, and everywhere else, where a loaded machine may be slow."""


@pytest.mark.parametrize(
    ("sizes", "room", "portions"),
    [([], 4, 1), ([0, 0], 4, 1), ([4, 1], 4, 1), ([5, 0], 4, 2), ([1, 4352], 128, 34), ([8192] * 64, 1, 8192)],
)
def test_the_rank_with_most_tokens_decides_how_many_portions_there_are(
    sizes: list[int], room: int, portions: int
) -> None:
    assert count_portions(sizes, room) == portions


@given(tokens=st.integers(0, 5000), portions=st.integers(1, 300))
def test_portions_hold_every_token_once_and_none_is_larger_than_it_must_be(tokens: int, portions: int) -> None:
    cut = list(Passage(portions=portions).cut(tokens))
    assert len(cut) == portions
    assert [row for rows in cut for row in range(tokens)[rows]] == list(range(tokens))
    sizes = [rows.stop - rows.start for rows in cut]
    assert max(sizes) - min(sizes) <= 1


@given(
    layout=st.sampled_from(("rank", "expert")),
    wire=st.sampled_from(("f32", "bf16", "fp8")),
    room=st.integers(1, 7),
    seed=st.integers(0, 2**16),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
# No shrinking: an example that fails makes its ranks wait for each other, and the drawn shapes are small already.
@settings(
    max_examples=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_ranks_with_more_and_fewer_tokens_than_the_room_get_the_sums_of_one_exchange(
    layout: str, wire: str, room: int, seed: int, sizes: list[int]
) -> None:
    config = moe.Config(ranks=len(sizes), max_ranks=4, max_tokens=20, room=room, hidden=128, layout=layout, wire=wire)
    active, portions = tuple(range(len(sizes))), count_portions(sizes, room)
    with eep.Rendezvous.temporary() as rendezvous:

        def body(rank: int) -> None:
            with config.buffer(rank, rendezvous, timeout_ms=PATIENT_MS) as buffer:
                buffer.connect_ranks(active)
                for step in (seed, seed + 1):
                    output = moe.step(buffer, config, step, active, sizes[rank], portions)
                    assert buffer.status().ok, buffer.status()
                    batch = moe.make_batch(config, rank, step, active, sizes[rank])
                    assert torch.equal(output, moe.reference(config, batch))
                buffer.barrier()

        on_threads(len(sizes), body)


def test_tokens_that_a_buffer_has_no_room_for_are_refused_at_once(rendezvous: eep.Rendezvous) -> None:
    config = moe.Config(ranks=1, max_ranks=1, max_tokens=20, room=5)
    with config.buffer(0, rendezvous) as buffer:
        buffer.connect_ranks([0])
        with pytest.raises(ValueError, match="tokens"):
            moe.step(buffer, config, 1, (0,), tokens=11, portions=2)
        assert torch.equal(
            moe.step(buffer, config, 1, (0,), tokens=11, portions=3),
            moe.reference(config, moe.make_batch(config, 0, 1, (0,), 11)),
        )


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_a_rank_that_dies_between_two_portions_of_a_batch(rendezvous: eep.Rendezvous, layout: str) -> None:
    config = moe.Config(max_tokens=16, room=3, layout=layout)
    with Ranks(rendezvous, config, timeout_ms=PATIENT_MS) as group:
        group.start(ALL)
        group.connect(ALL)
        group.check_steps(ALL, seed=1, count=3)
        for seed, (point, skip) in enumerate(
            [("dispatch.before_rows", 1), ("dispatch.after_rows", 2), ("combine.mid_pull", 0)], start=10
        ):
            assert moe.portions_of(config, seed, ALL) > 3, "the rank would have done its part"
            group[VICTIM].call("arm", point, "kill", skip)
            group.all(ALL, "set_timeout", SOON_MS)
            for rank in ALL:
                group[rank].send("step", seed, ALL)
            assert group[VICTIM].answer() == DIED
            for rank in SURVIVORS:
                outputs, status = group[rank].answer()
                assert outputs == [], "part of a batch was trusted"
                assert status.suspects == (VICTIM,), f"rank {rank}: {status}"
            group.all(SURVIVORS, "set_timeout", PATIENT_MS)
            group.all(SURVIVORS, "disconnect", [VICTIM])
            group.check_steps(SURVIVORS, seed=seed + 10)
            group.replace(VICTIM, SURVIVORS)
            group.check_steps(ALL, seed=seed + 20)
