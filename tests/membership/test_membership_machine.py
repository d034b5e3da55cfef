"""Hypothesis drives three cores over one store in any order it likes: events lost, repeated, late."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eep.membership import (
    EVERY_HOST,
    Deadline,
    Event,
    Exited,
    Fence,
    HostState,
    InstanceRecord,
    InstanceSeen,
    Launch,
    LeaseHeld,
    LeaseLost,
    Leave,
    Policy,
    Propose,
    Proposed,
    Publish,
    Ready,
    Report,
    ReportsListed,
    SetTimer,
    Settled,
    Suspected,
    Timer,
    initial_state,
    report_of,
    step,
    wanted_scope,
)
from eep.view import View

HOSTS = ("a", "b", "c")
RANKS = 6


class Membership(RuleBasedStateMachine):
    """The store is exact; everything between it and the hosts is up to the rules."""

    hosts = st.sampled_from(HOSTS)
    ranks = st.integers(0, RANKS - 1)

    @initialize()
    def start(self) -> None:
        self.record: InstanceRecord | None = None
        self.revision = 0
        self.reports: dict[str, Report] = {}
        self.lives = 0
        self.states: dict[str, HostState] = {}
        self.alive: set[tuple[str, int, int]] = set()
        self.launched: set[tuple[int, int]] = set()
        self.views: dict[int, View] = {}
        self.removed: set[tuple[int, int]] = set()
        self.lapsed: set[str] = set()
        self.left: set[tuple[int, int]] = set()
        self.answers: dict[str, list[Event]] = {host: [] for host in HOSTS}
        self.timers: list[tuple[str, Deadline]] = []
        for index, host in enumerate(HOSTS):
            self.boot(host, (2 * index, 2 * index + 1))
            self.register(host)
        for _ in range(8):  # a formed instance is where the interesting things start
            for host in HOSTS:
                self.catch_up(host)
        assert self.record is not None
        assert len(self.record.view.active) == RANKS

    def boot(self, host: str, ranks: tuple[int, ...]) -> None:
        self.lives += 1
        self.states[host] = initial_state(f"{host}#{self.lives}", ranks, Policy(max_ranks=RANKS))
        self.answers[host] = []

    def feed(self, host: str, event: Event) -> None:
        self.states[host], effects = step(self.states[host], event)
        for effect in effects:
            match effect:
                case Launch():
                    assert (effect.rank, effect.incarnation) not in self.launched, "launched twice"
                    self.launched.add((effect.rank, effect.incarnation))
                    self.alive.add((host, effect.rank, effect.incarnation))
                case Fence():
                    self.alive.discard((host, effect.rank, effect.incarnation))
                    self.answers[host].append(Exited(effect.rank, effect.incarnation, "fenced"))
                case Propose():
                    self.answers[host].append(self.swap(effect))
                case Publish():
                    if host in self.reports:
                        self.publish(host, effect.report)
                case SetTimer() if effect.deadline.timer is not Timer.FENCE:
                    self.timers.append((host, effect.deadline))

    def publish(self, host: str, report: Report) -> None:
        self.revision += 1
        self.reports[host] = report

    def swap(self, proposal: Propose) -> Proposed:
        """Compare, and commit if no other host came first; the serial stands in for the store's version."""
        held = self.record.serial if self.record else 0
        done = held == proposal.expected
        if done:
            self.commit(proposal.instance)
        assert self.record is not None
        return Proposed(proposal.instance.serial, done, self.record, self.record.serial)

    def commit(self, record: InstanceRecord) -> None:
        self.revision += 1
        view, last = record.view, self.record
        assert self.views.setdefault(view.epoch, view) == view
        members = {(rank, view.incarnations[rank]) for rank in view.active}
        if last is not None:
            assert 0 <= view.epoch - last.view.epoch <= 1
            before = {(rank, last.view.incarnations[rank]) for rank in last.view.active}
            for gone in before - members:
                self.removed.add(gone)
                holders = {host for host, *process in self.alive if tuple(process) == gone}
                assert not holders - self.lapsed or gone in self.left, f"{gone} removed alive: {record.reason}"
        assert not members & self.removed
        self.record = record

    # What the network does.

    @rule(host=hosts)
    def register(self, host: str) -> None:
        if host not in self.reports:
            self.publish(host, report_of(self.states[host]))
        self.feed(host, LeaseHeld())

    @rule(host=hosts)
    def lease_ends(self, host: str) -> None:
        self.lapsed.add(host)
        self.revision += 1
        self.reports.pop(host, None)

    @rule(host=hosts)
    def lease_is_uncertain(self, host: str) -> None:
        self.feed(host, LeaseLost())

    @rule(host=hosts)
    def look(self, host: str) -> None:
        if self.record is not None:
            self.feed(host, InstanceSeen(self.record, self.record.serial))
        scope = wanted_scope(self.states[host])
        found = {name: report for name, report in self.reports.items() if scope in (EVERY_HOST, name)}
        self.feed(host, ReportsListed(found, scope, self.revision))

    @rule(host=hosts, data=st.data(), repeat=st.booleans())
    def answer(self, host: str, data: st.DataObject, repeat: bool) -> None:
        if self.answers[host]:
            index = data.draw(st.integers(0, len(self.answers[host]) - 1))
            event = self.answers[host][index] if repeat else self.answers[host].pop(index)
            self.feed(host, event)

    @rule(host=hosts)
    def answer_is_lost(self, host: str) -> None:
        if self.states[host].in_flight:
            self.feed(host, Proposed(self.states[host].in_flight, None))

    @rule(data=st.data())
    def timer(self, data: st.DataObject) -> None:
        if self.timers:
            host, deadline = self.timers.pop(data.draw(st.integers(0, len(self.timers) - 1)))
            self.feed(host, deadline)

    @rule(host=hosts)
    def catch_up(self, host: str) -> None:
        """Everything that is under way to a host arrives, and its ranks do as they should."""
        while self.answers[host]:
            self.feed(host, self.answers[host].pop(0))
        self.look(host)
        for rank in self.states[host].ranks:
            self.ready(rank)
            self.settle(rank)

    # What ranks and hosts do.

    @rule(rank=ranks)
    def ready(self, rank: int) -> None:
        self.say(rank, lambda incarnation, epoch: Ready(rank, incarnation))

    @rule(rank=ranks)
    def settle(self, rank: int) -> None:
        self.say(rank, lambda incarnation, epoch: Settled(rank, incarnation, epoch))

    @rule(rank=ranks, suspect=ranks)
    def suspect(self, rank: int, suspect: int) -> None:
        self.say(rank, lambda incarnation, epoch: Suspected(rank, incarnation, epoch, (suspect,), "test"))

    @rule(rank=ranks)
    def leave(self, rank: int) -> None:
        self.left.add((rank, self.states[self.host_of(rank)].ranks[rank].incarnation))
        self.say(rank, lambda incarnation, epoch: Leave(rank, incarnation))

    @rule(rank=ranks)
    def crash(self, rank: int) -> None:
        host = self.host_of(rank)
        for process in [p for p in self.alive if p[:2] == (host, rank)]:
            self.alive.discard(process)
            self.answers[host].append(Exited(rank, process[2], "crashed"))

    @rule(host=hosts)
    def reboot(self, host: str) -> None:
        self.alive = {process for process in self.alive if process[0] != host}
        self.reports.pop(host, None)
        self.revision += 1
        self.boot(host, tuple(self.states[host].ranks))

    def host_of(self, rank: int) -> str:
        return HOSTS[rank // 2]

    def say(self, rank: int, event: Callable[[int, int], Event]) -> None:
        state = self.states[self.host_of(rank)]
        self.feed(self.host_of(rank), event(state.ranks[rank].incarnation, state.epoch))

    @invariant()
    def hosts_follow_commits_only(self) -> None:
        for state in getattr(self, "states", {}).values():
            if state.instance is not None:
                assert self.views[state.epoch] == state.instance.view
                assert not state.forgotten

    @invariant()
    def one_process_per_rank_and_host(self) -> None:
        places = [(host, rank) for host, rank, _ in getattr(self, "alive", ())]
        assert len(places) == len(set(places))


Membership.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, suppress_health_check=list(HealthCheck)
)
TestMembership = Membership.TestCase
