"""When nothing changes, the core says what it waits for."""

from __future__ import annotations

from eep.membership import (
    EVERY_HOST,
    Action,
    Exited,
    InstanceSeen,
    LeaseHeld,
    LeaseLost,
    OperatorAsked,
    Policy,
    Propose,
    Ready,
    ReportsListed,
    Settled,
    StopAsked,
    Suspected,
    Unchanged,
    decide,
    initial_state,
    report_of,
    step,
    waiting_for,
)
from eep.membership.events import Deadline, Timer
from tests.membership.membership_host import Host


def test_a_new_instance_waits_for_the_first_view() -> None:
    host = Host(ranks=(0, 1), first_view=3)
    assert waiting_for(host.state) == "ranks 0, 1 to get ready"
    host.feed(Ready(0, 0), Ready(1, 0))
    assert waiting_for(host.state) == "1 of the 3 ranks of the first view to get ready"


def test_an_agreed_view_waits_for_the_ranks_that_have_not_settled() -> None:
    """This host has one word for all its ranks, so none counts as settled before all are."""
    host = Host(ranks=(0, 1))
    host.feed(Ready(0, 0), Ready(1, 0), Settled(0, 0, 1))
    assert waiting_for(host.state) == "ranks 0, 1 to settle in epoch 1"


def test_an_instance_that_runs_waits_for_nothing() -> None:
    host = Host().run()
    assert waiting_for(host.state) == "nothing: ranks 0, 1, 2, 3 run, and no other rank is on its way"


def test_a_loss_waits_for_the_survivors_and_then_for_the_new_life() -> None:
    host = Host().run()
    host.feed(Exited(2, 0, "SIGKILL"))
    assert waiting_for(host.state) == "ranks 0, 1, 3 to settle in epoch 2"
    host.settle()
    assert waiting_for(host.state) == "rank 2 to get ready"


def test_an_accused_rank_waits_for_its_verdict_and_a_condemned_one_for_its_exit() -> None:
    host = Host().run()
    host.feed(Suspected(0, 0, 1, (3,), "1 s"))
    assert waiting_for(host.state) == "further accusations, before rank 3 is judged in epoch 1"
    host.feed(Deadline(Timer.JUDGE, 1))
    assert waiting_for(host.state) == "rank 3, condemned, to exit"


def test_an_empty_instance_waits_for_an_operator() -> None:
    host = Host(ranks=(0,)).run()
    host.feed(OperatorAsked("x", Action.REMOVE, 0), Exited(0, 0, "it left", clean=True))
    assert waiting_for(host.state) == "a rank to be launched: none is in, and none is on its way"


def test_a_host_without_a_lease_waits_for_the_store() -> None:
    host = Host().run()
    host.feed(LeaseLost())
    assert waiting_for(host.state) == "the store to confirm the lease of this host"


def test_a_proposal_waits_for_its_answer() -> None:
    host = Host().run()
    state, effects = step(host.state, Exited(0, 0, "SIGKILL"))
    (proposal,) = [effect for effect in effects if isinstance(effect, Propose)]
    assert waiting_for(state) == f"the store to answer the proposal of record {proposal.instance.serial}"


def test_a_host_that_follows_waits_for_the_coordinator() -> None:
    host = Host().run()
    other = initial_state("b#1", (), Policy(max_ranks=4))
    events = (InstanceSeen(host.instance, 5), LeaseHeld(), ReportsListed({"a": report_of(host.state)}, EVERY_HOST, 9))
    for event in events:
        other, _ = step(other, event)
    assert waiting_for(other) == "the coordinator, a#1, to decide"


def test_a_host_that_stops_before_there_is_a_record_founds_none() -> None:
    state = initial_state("a#1", (0,), Policy(max_ranks=4))
    for event in (StopAsked(), LeaseHeld(), ReportsListed({}, EVERY_HOST, 1)):
        state, effects = step(state, event)
        assert not [effect for effect in effects if isinstance(effect, Propose)]
    assert waiting_for(state) == "this supervisor to end"


def test_decide_itself_says_why_nothing_changes() -> None:
    host = Host(ranks=(0, 1)).run()
    decided = decide(host.instance, {"a": report_of(host.state)})
    assert decided == Unchanged("nothing: ranks 0, 1 run, and no other rank is on its way")
