"""The pure core, one decision at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eep.membership import (
    EVERY_HOST,
    Accusation,
    Action,
    Deadline,
    Effect,
    Event,
    Exited,
    Fence,
    Instance,
    InstanceSeen,
    Launch,
    LeaseHeld,
    LeaseLost,
    Leave,
    Life,
    Notify,
    OperatorAsked,
    Phase,
    Policy,
    Propose,
    Proposed,
    PulseStopped,
    RankReport,
    Ready,
    Reject,
    Report,
    ReportSeen,
    ReportsListed,
    Revoke,
    Settled,
    State,
    Status,
    StopAsked,
    Suspected,
    Timer,
    decide,
    initial_state,
    judge,
    next_incarnation,
    phase_name,
    step,
)
from eep.view import NEVER, View


def accuse(*pairs: tuple[int, int]) -> list[Accusation]:
    return [Accusation(1, accuser, suspect) for accuser, suspect in pairs]


class Host:
    """One host with a store of its own that answers at once."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1, 2, 3), **policy: float) -> None:
        self.state: State = initial_state("a#1", ranks, Policy(max_ranks=4, **policy))  # type: ignore[arg-type]
        self.seen: list[Effect] = []
        self.version = 0
        self.feed(LeaseHeld(), ReportsListed({}, EVERY_HOST, 1))

    def feed(self, *events: Event) -> list[Effect]:
        """The effects of ``events`` and of the commits that followed from them."""
        first = len(self.seen)
        for event in events:
            self.state, effects = step(self.state, event)
            self.seen.extend(effects)
            for effect in effects:
                if isinstance(effect, Propose):
                    assert effect.expected == self.version
                    self.version += 1
                    self.feed(Proposed(effect.instance.serial, True, effect.instance, self.version))
        return self.seen[first:]

    @property
    def instance(self) -> Instance:
        assert self.state.instance is not None
        return self.state.instance

    def run(self) -> Host:
        """Bring every rank in."""
        for rank, local in self.state.ranks.items():
            self.feed(Ready(rank, local.incarnation))
        return self.settle()

    def settle(self) -> Host:
        for rank in self.instance.view.active:
            self.feed(Settled(rank, self.state.ranks[rank].incarnation, self.state.epoch))
        assert self.instance.phase is Phase.RUN
        return self


def of_type(effects: list[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


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
    ids=["nobody", "one hung", "two hung", "mutual", "halves", "waited for it", "nonsense", "repeated"],
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


def test_suspicion_is_not_removal() -> None:
    host = Host().run()
    effects = host.feed(*[Suspected(rank, 0, 1, (3,), "1 s") for rank in (0, 1, 2)])
    assert of_type(effects, Revoke), "everybody leaves the step at once"
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
    assert host.state.ranks[2].status is Status.STUCK
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
    assert host.state.ranks[1].status is Status.DOWN
    host.feed(OperatorAsked("again", Action.LAUNCH, 1))
    assert host.state.ranks[1].status is Status.STARTING


def test_leaving_is_planned_and_not_followed_by_a_relaunch() -> None:
    host = Host().run()
    host.feed(Leave(2, 0))
    assert host.instance.view.active == (0, 1, 3)
    assert not of_type(host.seen, Fence)
    assert of_type(host.feed(Deadline(Timer.LEAVE, 0, 2)), Fence), "it had its grace"
    host.feed(Exited(2, 0, "SIGKILL"))
    assert host.state.ranks[2].status is Status.DOWN


def test_a_rank_that_never_settles_or_never_gets_ready_is_fenced() -> None:
    host = Host(ranks=(0, 1))
    host.feed(Deadline(Timer.START, 0, 1))
    assert host.state.ranks[1].status is Status.FENCING
    host.feed(Exited(1, 0, "SIGKILL"))
    host.feed(Ready(0, 0), Ready(1, 1), Settled(0, 0, 1))
    assert of_type(host.feed(Deadline(Timer.SETTLE, 1)), Fence) == [
        Fence(1, 1, "rank 1 did not settle in epoch 1 in time")
    ]


def test_stopping_ends_every_rank_and_launches_none() -> None:
    host = Host().run()
    assert len(of_type(host.feed(StopAsked()), Fence)) == 4
    assert not of_type(host.feed(*[Exited(rank, 0, "SIGKILL") for rank in range(4)]), Launch)
    assert all(local.status is Status.DOWN for local in host.state.ranks.values())


def test_without_a_lease_ranks_are_held_and_nothing_is_proposed() -> None:
    host = Host().run()
    assert of_type(host.feed(LeaseLost()), Revoke)
    assert phase_name(host.state) == "REVOKED"
    assert not of_type(host.feed(Exited(0, 0, "SIGKILL"), Suspected(1, 0, 1, (2,), "1 s")), Propose)
    host.feed(LeaseHeld(), ReportsListed({}, EVERY_HOST, 9))
    assert host.instance.view == View(2, (1, 2, 3), (0, 0, 0, 0))


# Bad input: an error, no change, a count.


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
        (InstanceSeen(Instance.founded("b#1", 9), 99), "wrong-capacity"),
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


@pytest.mark.parametrize("held", [None, Instance.founded("z#9", 4)])
def test_a_store_that_forgets_is_told_apart_and_not_written_to(held: Instance | None) -> None:
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
    assert after is not None
    assert after.phase is Phase.RUN
    assert decide(after, reports) is None, "the ghost was let in"


@pytest.mark.parametrize(
    ("ident", "ranks"), [("a", (0,)), ("#1", (0,)), ("a/b#1", (0,)), ("a#1", (4,)), ("a#1", (1, 1))]
)
def test_a_host_that_makes_no_sense_does_not_start(ident: str, ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"supervisor is called|ranks must be"):
        initial_state(ident, ranks, Policy(max_ranks=4))
