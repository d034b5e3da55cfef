"""A rank that has work and makes no progress is fenced, and no other is."""

from __future__ import annotations

import pytest

from eep.membership import (
    Exited,
    Fence,
    Reject,
    Settled,
    Stalled,
    Standstill,
    Transition,
    after_look,
    has_stalled,
    must_advance,
)
from tests.membership.membership_host import Host, of_type

DUE = 1.0


def seen_after(*looks: tuple[int, float], incarnation: int = 0) -> Standstill:
    """``looks``: the word and when it was read."""
    seen = None
    for word, now in looks:
        seen = after_look(seen, incarnation, word, now, DUE)
    assert seen is not None
    return seen


def test_a_word_that_does_not_change_stands_still_since_it_was_first_read() -> None:
    assert seen_after((2, 10.0), (2, 11.0), (2, 12.0)).seconds == 2.0


def test_a_word_that_changed_counts_from_nothing() -> None:
    assert seen_after((2, 10.0), (2, 11.0), (4, 12.0)).seconds == 0.0


def test_the_word_of_another_life_counts_from_nothing() -> None:
    assert after_look(seen_after((2, 10.0), (2, 11.0)), 1, 2, 12.0, DUE).seconds == 0.0


@pytest.mark.parametrize("later", [90.0, -90.0], ids=["suspended", "clock set back"])
def test_time_in_which_the_supervisor_did_not_look_does_not_count(later: float) -> None:
    assert seen_after((2, 10.0), (2, 10.0 + later)).seconds <= DUE


def test_a_standstill_is_a_stall_at_the_deadline() -> None:
    assert has_stalled(Standstill(0, 2, 0.0, 60.0), 60.0)
    assert not has_stalled(Standstill(0, 2, 0.0, 59.0), 60.0)


def test_ranks_must_advance_while_the_instance_runs_and_until_they_have_settled() -> None:
    host = Host()
    assert not must_advance(host.state, 1), "it starts"
    host.run()
    assert must_advance(host.state, 1)
    host.feed(Exited(2, 0, "SIGKILL"))
    assert must_advance(host.state, 1), "it settles"
    host.feed(Settled(1, 0, host.state.epoch))
    assert not must_advance(host.state, 1), "it waits for the others"
    assert must_advance(host.state, 3), "the others wait for it"
    host.settle()
    assert must_advance(host.state, 1)
    assert not must_advance(host.state, 2), "it is not in"


def test_without_a_deadline_no_rank_must_advance() -> None:
    assert not must_advance(Host(stall_deadline=0.0).run().state, 1)


def test_ranks_that_stalled_together_are_fenced_and_the_log_says_why() -> None:
    effects = Host().run().feed(*(Stalled(rank, 0, 60.2) for rank in range(4)))
    assert [fence.rank for fence in of_type(effects, Fence)] == [0, 1, 2, 3]  # type: ignore[attr-defined]
    told = [effect.cause for effect in effects if isinstance(effect, Transition) and effect.phase == "FENCING"]
    assert told == [f"rank {rank} made no progress for 60 s" for rank in range(4)]


def test_a_standstill_of_an_older_life_fences_no_rank() -> None:
    effects = Host().run().feed(Stalled(1, 7, 60.0))
    assert not of_type(effects, Fence)
    assert of_type(effects, Reject)
