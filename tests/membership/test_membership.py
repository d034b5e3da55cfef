"""The pure core, one decision at a time."""

from __future__ import annotations

import pytest

from eep.membership import (
    EVERY_HOST,
    Accusation,
    Action,
    Deadline,
    Exited,
    Fence,
    Launch,
    LeaseHeld,
    LeaseLost,
    Leave,
    Notify,
    OperatorAsked,
    Phase,
    Propose,
    PulseStopped,
    RankStatus,
    Ready,
    ReportsListed,
    Revoke,
    Settled,
    StopAsked,
    Suspected,
    Timer,
    judge,
    next_incarnation,
    phase_name,
    why_it_must_stay,
)
from eep.view import NEVER, View
from tests.membership.membership_host import Host, of_type


def accuse(*pairs: tuple[int, int]) -> list[Accusation]:
    return [Accusation(1, accuser, suspect) for accuser, suspect in pairs]


# Judging.


@pytest.mark.parametrize(
    ("pairs", "condemned"),
    [
        ([], ()),
        ([(0, 3), (1, 3), (2, 3)], (3,)),
        ([(0, 2), (1, 2), (0, 3), (1, 3)], (2, 3)),
        ([(0, 1), (1, 0)], (1,)),
        ([(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)], (2, 3)),
        ([(0, 3), (1, 3), (2, 1)], (3,)),
        ([(0, 0), (9, 1), (1, 9)], ()),
        ([(0, 3), (0, 3), (0, 3)], (3,)),
    ],
    ids=["none", "one hung", "two hung", "mutual", "halves", "waited for it", "nonsense", "repeated"],
)
def test_judge(pairs: list[tuple[int, int]], condemned: tuple[int, ...]) -> None:
    assert judge(range(4), accuse(*pairs)) == condemned


def test_incarnations_grow_and_alternate_with_the_last_one_that_was_in() -> None:
    assert next_incarnation(NEVER, NEVER) == 0
    assert next_incarnation(0, 0) == 1
    assert next_incarnation(1, 0) == 3, "1 was launched but never in; 2 would share the inbox of 0"
    assert next_incarnation(4, NEVER) == 5


# A life.


def test_a_host_forms_runs_loses_a_rank_and_gets_it_back() -> None:
    host = Host()
    assert [type(e) for e in of_type(host.seen, Launch)] == [Launch] * 4
    host.run()
    assert host.instance.view == View(1, (0, 1, 2, 3), (0, 0, 0, 0))
    effects = host.feed(Exited(0, 0, "SIGKILL"))
    kinds = [type(effect) for effect in effects if isinstance(effect, Revoke | Propose | Launch | Notify)]
    assert kinds == [Revoke, Propose, Revoke, Notify], "nothing is launched before the survivors run"
    assert host.instance.view == View(2, (1, 2, 3), (0, 0, 0, 0))
    assert "rank 0 (incarnation 0) is dead" in host.instance.reason
    before = len(host.seen)
    host.settle()
    kinds = [type(effect) for effect in host.seen[before:] if isinstance(effect, Notify | Launch)]
    assert kinds == [Notify, Launch], "the survivors are told to run before anything is launched"
    host.feed(Ready(0, 1))
    assert host.instance.view == View(3, (0, 1, 2, 3), (1, 0, 0, 0))
    host.settle()


def test_joins_wait_for_a_repair_but_faults_do_not() -> None:
    host = Host().run()
    host.feed(Exited(0, 0, "SIGKILL"))
    host.settle()
    host.feed(Exited(1, 0, "SIGKILL"), Ready(0, 1))
    assert host.instance.view == View(3, (2, 3), (0, 0, 0, 0))
    host.feed(Exited(2, 0, "SIGKILL"))
    assert host.instance.view == View(4, (3,), (0, 0, 0, 0))
    host.feed(Settled(3, 0, 4))
    assert host.instance.view == View(5, (0, 3), (1, 0, 0, 0))


def test_after_the_loss_of_all_the_ranks_that_come_back_form_the_instance() -> None:
    """Also when fewer are left than it first waited for: one was taken out, and no other would come."""
    host = Host(first_view=4).run()
    host.feed(OperatorAsked("x", Action.REMOVE, 3), Exited(3, 0, "it left"))
    host.settle()
    host.feed(*[Exited(rank, 0, "SIGKILL") for rank in range(3)])
    assert host.instance.view.active == ()
    host.feed(Ready(0, 1), Ready(1, 1))
    assert host.instance.view.active == (), "it starts once, with all that are coming"
    host.feed(Ready(2, 1))
    assert host.instance.view.active == (0, 1, 2)


def test_a_rank_without_which_too_few_would_stay_is_not_for_an_operator_to_take_out() -> None:
    host = Host(fewest_ranks=3).run()
    assert why_it_must_stay(host.state, 2) is None
    host.feed(OperatorAsked("x", Action.REMOVE, 2))
    assert host.instance.view.active == (0, 1, 3)
    assert "2 would stay, and 3 are needed" in (why_it_must_stay(host.state, 0) or "")
    assert why_it_must_stay(host.state, 2) is None, "it is out already; asking again is no harm"


def test_a_rank_that_comes_back_is_not_taken_out_where_too_few_would_serve_or_come_back() -> None:
    host = Host(fewest_ranks=3).run()
    host.feed(Exited(2, 0, "SIGKILL"), Exited(3, 0, "SIGKILL"))
    host.settle()
    assert host.instance.view.active == (0, 1)
    assert why_it_must_stay(host.state, 2) is None, "rank 3 comes back"
    host.feed(OperatorAsked("x", Action.REMOVE, 2))
    assert "2 would serve or come back, and 3 are needed" in (why_it_must_stay(host.state, 3) or "")
    assert why_it_must_stay(host.state, 2) is None, "it is out already; asking again is no harm"


def test_those_that_are_leaving_do_not_stay() -> None:
    host = Host(fewest_ranks=3).run()
    host.feed(Exited(0, 0, "SIGKILL"), OperatorAsked("x", Action.REMOVE, 2))
    assert host.instance.view.active == (1, 2, 3), "it leaves when the loss has been repaired"
    assert "1 would stay" in (why_it_must_stay(host.state, 1) or "")


def test_suspicion_is_not_removal() -> None:
    host = Host().run()
    effects = host.feed(*[Suspected(rank, 0, 1, (3,), "1 s") for rank in (0, 1, 2)])
    assert of_type(effects, Revoke), "every rank leaves the step at once"
    assert not of_type(effects, Fence)
    assert host.instance.view.epoch == 1
    effects = host.feed(Deadline(Timer.JUDGE, 1))
    assert of_type(effects, Fence) == [
        Fence(3, 0, "rank 3 kept rank 0, rank 1, rank 2 waiting"),
    ]
    assert 3 in host.instance.view.active, "a verdict is not a removal either"
    host.feed(Exited(3, 0, "SIGKILL"))
    assert host.instance.view.active == (0, 1, 2)


def test_a_rank_that_does_not_die_is_out_and_is_not_replaced() -> None:
    host = Host().run()
    host.feed(OperatorAsked("x", Action.KILL, 2), Deadline(Timer.FENCE, 0, 2))
    assert host.state.ranks[2].status is RankStatus.STUCK
    assert host.instance.view.active == (0, 1, 3)
    host.settle()
    assert host.instance.granted[2] == 0
    host.feed(Exited(2, 0, "at last"))
    assert host.instance.granted[2] == 1


def test_a_dying_rank_is_out_before_its_exit_and_replaced_after_it() -> None:
    host = Host().run()
    effects = host.feed(PulseStopped(1, 0))
    assert of_type(effects, Revoke)
    assert [effect.rank for effect in effects if isinstance(effect, Fence)] == [1], "its other threads must end too"
    assert host.instance.view.active == (0, 2, 3)
    host.settle()
    assert host.instance.granted[1] == 0, "nothing takes its place before its exit is seen"
    assert not host.feed(PulseStopped(1, 0))
    host.feed(Exited(1, 0, "SIGKILL"))
    assert host.instance.granted[1] == 1


def test_a_crash_loop_backs_off_and_ends() -> None:
    host = Host(relaunch_limit=3).run()
    delays = []
    for _ in range(4):
        local = host.state.ranks[1]
        effects = host.feed(Exited(1, local.incarnation, "exit 1"))
        if host.instance.phase is Phase.AGREED:
            host.settle()
        for effect in effects:
            deadline = getattr(effect, "deadline", None)
            if deadline is not None and deadline.timer is Timer.RELAUNCH:
                delays.append(effect.delay)  # type: ignore[union-attr]
                host.feed(deadline)
    assert delays == [0.5, 1.0]
    assert host.state.ranks[1].status is RankStatus.DOWN
    host.feed(OperatorAsked("again", Action.LAUNCH, 1))
    assert host.state.ranks[1].status is RankStatus.STARTING


def test_leaving_is_planned_and_not_followed_by_a_relaunch() -> None:
    host = Host().run()
    host.feed(Leave(2, 0))
    assert host.instance.view.active == (0, 1, 3)
    assert not of_type(host.seen, Fence)
    assert of_type(host.feed(Deadline(Timer.LEAVE, 0, 2)), Fence), "it had its grace"
    host.feed(Exited(2, 0, "SIGKILL"))
    assert host.state.ranks[2].status is RankStatus.DOWN


def test_a_rank_that_never_settles_or_never_gets_ready_is_fenced() -> None:
    host = Host(ranks=(0, 1))
    host.feed(Deadline(Timer.START, 0, 1))
    assert host.state.ranks[1].status is RankStatus.FENCING
    host.feed(Exited(1, 0, "SIGKILL"))
    host.feed(Ready(0, 0), Ready(1, 1), Settled(0, 0, 1))
    assert of_type(host.feed(Deadline(Timer.SETTLE, 1)), Fence) == [
        Fence(1, 1, "rank 1 did not settle in epoch 1 in time")
    ]


def test_stopping_ends_every_rank_and_launches_none() -> None:
    host = Host().run()
    assert len(of_type(host.feed(StopAsked()), Fence)) == 4
    assert not of_type(host.feed(*[Exited(rank, 0, "SIGKILL") for rank in range(4)]), Launch)
    assert all(local.status is RankStatus.DOWN for local in host.state.ranks.values())


def test_without_a_lease_ranks_are_held_and_nothing_is_proposed() -> None:
    host = Host().run()
    assert of_type(host.feed(LeaseLost()), Revoke)
    assert phase_name(host.state) == "REVOKED"
    assert not of_type(host.feed(Exited(0, 0, "SIGKILL"), Suspected(1, 0, 1, (2,), "1 s")), Propose)
    host.feed(LeaseHeld(), ReportsListed({}, EVERY_HOST, 9))
    assert host.instance.view == View(2, (1, 2, 3), (0, 0, 0, 0))
