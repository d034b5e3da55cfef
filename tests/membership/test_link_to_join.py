"""A rank joins only ranks that its host is linked with: others could exchange no tokens with it."""

from __future__ import annotations

import pytest

from eep.membership import (
    EVERY_HOST,
    Exited,
    HostState,
    InstanceRecord,
    InstanceSeen,
    LeaseHeld,
    Life,
    LinksSeen,
    Phase,
    Policy,
    Publish,
    RankReport,
    Ready,
    Report,
    ReportsListed,
    initial_state,
    report_of,
    step,
)
from eep.view import View

OTHER, THIRD = "a#1", "c#1"


def state_of(active: tuple[int, ...], coordinator: str = OTHER, ident: str = "b#1") -> HostState:
    """Of host b with ranks 2 and 3, the first of which has just got ready, in its second life. Of those of host a, and the
    other of b, ``active`` are in."""
    owners = ("a#1", "a#1", "b#1", "b#1")
    record = InstanceRecord(9, View(7, active, (0, 0, 0, 0)), Phase.RUN, coordinator, owners, (0, 0, 1, 0))
    theirs = Report(OTHER, {rank: RankReport(Life.READY, 0) for rank in (0, 1)}, 7)
    state = initial_state(ident, (2, 3), Policy(max_ranks=4))
    for event in (LeaseHeld(), ReportsListed({"a": theirs}, EVERY_HOST, 5), InstanceSeen(record, 6), Ready(2, 1)):
        state, _ = step(state, event)
    return state


def after(state: HostState, *down: str) -> HostState:
    return step(state, LinksSeen(down))[0]


def life_of(state: HostState, rank: int) -> Life:
    return report_of(state).ranks[rank].life


def test_a_rank_is_not_told_to_be_ready_while_there_is_no_link_to_ranks_that_are_in() -> None:
    state = state_of((0, 1))
    assert life_of(state, 2) is Life.READY
    cut = after(state, OTHER)
    assert life_of(cut, 2) is Life.STARTING
    healed, effects = step(cut, LinksSeen(()))
    assert life_of(healed, 2) is Life.READY
    assert any(isinstance(effect, Publish) for effect in effects), "the others must hear of it"


@pytest.mark.parametrize("down", [(THIRD,), ("a#0",)], ids=["another host", "an earlier supervisor"])
def test_a_link_to_a_host_without_ranks_that_are_in_is_not_needed(down: tuple[str, ...]) -> None:
    assert life_of(after(state_of((0, 1)), *down), 2) is Life.READY
    assert life_of(after(state_of((3,)), OTHER), 2) is Life.READY, "the coordinator has no rank that is in"


def test_a_rank_that_is_in_stays_ready_when_the_link_is_lost() -> None:
    """Whether it can go on is for the ranks to say, and for their accusations."""
    state = state_of((0, 1))
    record = InstanceRecord(
        10, View(8, (0, 1, 2), (0, 0, 1, 0)), Phase.RUN, OTHER, ("a#1", "a#1", "b#1", "b#1"), (0, 0, 1, 0)
    )
    state, _ = step(state, InstanceSeen(record, 7))
    assert life_of(after(state, OTHER), 2) is Life.READY


def test_where_no_rank_is_in_those_of_the_coordinator_begin() -> None:
    """So one side serves, and the other waits for the link."""
    assert life_of(after(state_of((), coordinator=OTHER), OTHER), 2) is Life.STARTING
    assert life_of(after(state_of((), coordinator="b#1"), OTHER), 2) is Life.READY


def test_a_rank_that_waits_for_a_link_and_dies_is_told_as_any_other() -> None:
    state, _ = step(after(state_of((0, 1)), OTHER), Exited(2, 1, "killed"))
    assert not life_of(state, 2).alive
