"""Bad input to the pure core: a clear error, no change, a count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eep.membership import (
    EVERY_HOST,
    Action,
    Deadline,
    Event,
    EvidenceGiven,
    Exited,
    Fence,
    InstanceRecord,
    InstanceSeen,
    Launch,
    Leave,
    Life,
    OperatorAsked,
    Phase,
    Policy,
    Propose,
    Proposed,
    RankReport,
    Ready,
    Reject,
    Report,
    ReportSeen,
    ReportsListed,
    Settled,
    Suspected,
    Timer,
    Unchanged,
    decide,
    initial_state,
    step,
)
from eep.view import View
from tests.membership.membership_host import Host, of_type


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (Exited(9, 0, "?"), "unknown-rank"),
        (Exited(0, 7, "?"), "stale-incarnation"),
        (Ready(0, 7), "stale-incarnation"),
        (Ready(0, -1), "stale-incarnation"),
        (Settled(0, 0, 99), "stale-epoch"),
        (Suspected(0, 0, 0, (1,), "late"), "stale-epoch"),
        (Suspected(0, 0, 1, (9,), "who?"), "unknown-rank"),
        (Suspected(0, 0, 1, (0,), "itself"), "unknown-rank"),
        (Leave(0, 5), "stale-incarnation"),
        (OperatorAsked("x", Action.KILL, 77), "unknown-rank"),
        (EvidenceGiven("x", 77, "lost", True), "unknown-rank"),
        (InstanceSeen(InstanceRecord.founded("b#1", 9), 99), "wrong-capacity"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_input_is_rejected_and_changes_nothing(event: Event, kind: str) -> None:
    host = Host().run()
    after, effects = step(host.state, event)
    assert after == host.state
    (rejected,) = effects
    assert isinstance(rejected, Reject)
    assert rejected.kind == kind
    assert rejected.reason


def test_a_change_that_overtakes_its_listing_stands() -> None:
    host = Host().run()
    new, old = Report("b#1", settled=5), Report("b#1", settled=4)
    host.feed(ReportSeen("b", new, 80), ReportSeen("c", None, 81))
    host.feed(ReportsListed({"b": old, "c": old, "d": old}, EVERY_HOST, 79))
    assert host.state.reports["b"] == new
    assert "c" not in host.state.reports
    assert host.state.reports["d"] == old
    host.feed(ReportSeen("d", new, 79))
    assert host.state.reports["d"] == old, "the listing already held that"


def test_a_report_of_ranks_that_cannot_exist_is_rejected() -> None:
    host = Host().run()
    bad = Report("b#1", {99: RankReport(Life.READY, 0)})
    after, effects = step(host.state, ReportSeen("b", bad, 50))
    assert [type(effect) for effect in effects] == [Reject]
    assert "b" not in after.reports


def test_events_seen_again_change_nothing() -> None:
    host = Host().run()
    for event in (
        InstanceSeen(host.instance, host.version),
        InstanceSeen(replace(host.instance, serial=1, view=View.empty(4)), 1),
        InstanceSeen(None, 0),
        Ready(0, 0),
        Settled(0, 0, 1),
        Deadline(Timer.START, 0, 0),
        Deadline(Timer.SETTLE, 1),
        Deadline(Timer.FENCE, 0, 0),
        Proposed(2, False, None, 0),
    ):
        after, effects = step(host.state, event)
        assert after == host.state, event
        assert not effects, event


@pytest.mark.parametrize("held", [None, InstanceRecord.founded("z#9", 4)])
def test_a_store_that_forgets_is_told_apart_and_not_written_to(held: InstanceRecord | None) -> None:
    host = Host().run()
    state, effects = step(host.state, Exited(0, 0, "SIGKILL"))
    (proposal,) = [effect for effect in effects if isinstance(effect, Propose)]
    state, effects = step(state, Proposed(proposal.instance.serial, False, held, 3))
    assert [effect.kind for effect in effects if isinstance(effect, Reject)] == ["store-forgot"]
    assert state.instance == host.instance
    state, effects = step(state, Exited(1, 0, "SIGKILL"))
    assert not [effect for effect in effects if isinstance(effect, Propose)]
    restored = replace(proposal.instance, coordinator="a#1")
    state, _ = step(state, InstanceSeen(restored, 60))
    assert state.instance == restored
    assert not state.forgotten


def test_two_supervisors_cannot_have_the_same_rank() -> None:
    host = Host().run()
    other = Report("b#1", {0: RankReport(Life.WANTED)})
    host.feed(ReportSeen("b", other, 70))
    assert host.instance.owners[0] == "a#1"
    late = initial_state("b#1", (0,), Policy(max_ranks=4))
    late, effects = step(late, InstanceSeen(host.instance, 5))
    assert [effect.kind for effect in effects if isinstance(effect, Reject)] == ["rank-claimed"]
    assert not [effect for effect in effects if isinstance(effect, Launch)]


def test_an_operation_is_done_once() -> None:
    host = Host().run()
    host.feed(OperatorAsked("op-1", Action.KILL, 2), Exited(2, 0, "SIGKILL"))
    host.settle()
    host.feed(Ready(2, 1))
    assert not of_type(host.feed(OperatorAsked("op-1", Action.KILL, 2)), Fence)


def test_a_removed_incarnation_never_returns() -> None:
    host = Host().run()
    host.feed(Exited(3, 0, "SIGKILL"))
    ghost = Report("b#1", {3: RankReport(Life.READY, 0)})
    reports = {"a": Report("a#1", {r: RankReport(Life.READY, 0) for r in (0, 1, 2)}, settled=2), "b": ghost}
    after = decide(host.instance, reports)
    assert isinstance(after, InstanceRecord)
    assert after.phase is Phase.RUN
    assert isinstance(decide(after, reports), Unchanged), "the ghost was let in"


@pytest.mark.parametrize(
    ("ident", "ranks"), [("a", (0,)), ("#1", (0,)), ("a/b#1", (0,)), ("a#1", (4,)), ("a#1", (1, 1))]
)
def test_a_host_that_makes_no_sense_does_not_start(ident: str, ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"supervisor is called|ranks must be"):
        initial_state(ident, ranks, Policy(max_ranks=4))
