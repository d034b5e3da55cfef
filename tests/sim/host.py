"""A simulated host: the real core, driven by virtual time over the simulated network."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from eep.control.key_value import Change, LeaseEndedError
from eep.membership import (
    EVERY_HOST,
    Deadline,
    Effect,
    Event,
    Exited,
    Fence,
    InstanceSeen,
    Launch,
    LeaseHeld,
    LeaseLost,
    Notify,
    Policy,
    Propose,
    Proposed,
    Publish,
    Ready,
    Reject,
    Report,
    ReportSeen,
    ReportsListed,
    Revoke,
    SetTimer,
    Settled,
    Suspected,
    initial_state,
    report_of,
    step,
    wanted_scope,
)
from eep.view import View
from tests.sim.rank import SimRank
from tests.sim.world import HOST_PREFIX, INSTANCE_KEY, NODES, World

LEASE_TTL = 6.0
CERTAIN_FOR = 4.0
"""How long after it was last renewed a host relies on its lease: less than the store does."""
ANSWER_WITHIN = 1.0
STEP_DEADLINE = 1.0


class SimHost:
    def __init__(self, world: World, name: str, ident: str, ranks: tuple[int, ...], policy: Policy) -> None:
        self.world, self.name = world, name
        self.state = initial_state(ident, ranks, policy)
        self.processes: dict[int, SimRank] = {}
        self.alive = True
        self.paused = False
        self.clock_offset = 0.0
        self.rejects: Counter[str] = Counter()
        self.launch_time = (0.05, 0.5)
        self.crash_at_start = 0.0
        self.on_launch: Callable[[SimRank], None] = lambda rank: None
        self._backlog: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Deadline]] = []
        self._lease: int | None = None
        self._renewed = -1e9
        self._registering = False
        self._node = world.random.choice(NODES)
        self._host_key_version = 0
        self._report: Report | None = None
        self._publishing = False
        self._watched = ""
        self._watch_number = 0
        world.hosts[name] = self
        self._register()
        self._watch_instance()
        self._beat()

    # Time, as this host sees it.

    @property
    def clock(self) -> float:
        return self.world.now + self.clock_offset

    def jump_clock(self, seconds: float) -> None:
        self.clock_offset += seconds
        self._later(0, self._check_timers)

    def _later(self, delay: float, action: Callable[[], None]) -> None:
        self.world.at(delay, lambda: self._do(action))

    def _do(self, action: Callable[[], None]) -> None:
        """Run now, or when the host is resumed, or never if it is dead."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.append(action)
        else:
            action()

    def resume(self) -> None:
        self.paused = False
        while self._backlog and self.alive and not self.paused:
            self._backlog.popleft()()

    def kill(self) -> None:
        """The host is lost, and every process on it."""
        self.alive = False
        for process in self.processes.values():
            process.alive = False
        for what in ("instance", "reports"):
            self.world.unwatch(f"{self.name}:{what}:{id(self)}")

    def _check_timers(self) -> None:
        due = [deadline for when, deadline in self._timers if when <= self.clock]
        self._timers = [(when, deadline) for when, deadline in self._timers if when > self.clock]
        for deadline in due:
            self.feed(deadline)

    # The core.

    def feed(self, event: Event) -> None:
        if not self.alive:
            return
        self.state, effects = step(self.state, event)
        for effect in effects:
            self._carry_out(effect)
        if wanted_scope(self.state) != self._watched:
            self._watched = wanted_scope(self.state)
            self._list_reports()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Revoke():
                for process in self.processes.values():
                    process.revoked = max(process.revoked, effect.epoch)
            case Propose():
                self._propose(effect)
            case Publish():
                self._report = effect.report
                self._publish()
            case Fence():
                self._later(0.01, lambda: self._end(effect.rank, effect.incarnation, "SIGKILL"))
            case Launch():
                self._launch(effect.rank, effect.incarnation)
            case Notify():
                for process in list(self.processes.values()):
                    self._later(0.001, lambda p=process: self._tell(p, effect))  # type: ignore[misc]
            case SetTimer():
                self._timers.append((self.clock + effect.delay, effect.deadline))
                self._later(effect.delay + 1e-6, self._check_timers)
            case Reject():
                self.rejects[effect.kind] += 1

    # Processes.

    def _launch(self, rank: int, incarnation: int) -> None:
        process = SimRank(rank, incarnation, self.name)
        old = self.processes.get(rank)
        assert old is None or not old.alive, f"rank {rank} was launched while incarnation {old} still ran"
        self.processes[rank] = process
        self.on_launch(process)
        start = self.world.random.uniform(*self.launch_time)
        if self.world.random.random() < self.crash_at_start:
            self._later(start, lambda: self._end(rank, incarnation, "crashed at start"))
        else:
            self._later(start, lambda: process.alive and self.feed(Ready(rank, incarnation)))  # type: ignore[func-returns-value]

    def _end(self, rank: int, incarnation: int, evidence: str) -> None:
        process = self.processes.get(rank)
        if process is not None and process.incarnation == incarnation and process.alive:
            if evidence == "SIGKILL" and process.unkillable:
                return
            process.alive = False
            self._later(0.001, lambda: self.feed(Exited(rank, incarnation, evidence)))

    def crash(self, rank: int) -> None:
        process = self.processes.get(rank)
        if process is not None and process.alive:
            # The process is gone at once; its supervisor sees it when it can.
            process.alive = False
            self._do(lambda: self.feed(Exited(rank, process.incarnation, "crashed")))

    def resume_rank(self, rank: int) -> None:
        process = self.processes.get(rank)
        if process is not None and process.paused:
            process.paused = False
            owed, process.owed = process.owed, []
            for view, phase in owed:
                self._follow(process, view, phase)

    def _tell(self, process: SimRank, notice: Notify) -> None:
        if process.paused:
            process.owed.append((notice.view, notice.phase))
        elif process.alive:
            self._follow(process, notice.view, notice.phase)

    def _follow(self, process: SimRank, view: View, phase: Any) -> None:
        known = process.view
        if not process.alive or (known is not None and view.epoch < known.epoch):
            return
        new_epoch = known is None or view.epoch > known.epoch
        process.view, process.phase = view, phase
        if new_epoch and process.rank in view.active:
            repair = self.world.random.uniform(0.01, 0.3)
            settled = Settled(process.rank, process.incarnation, view.epoch)
            self._later(repair, lambda: process.alive and not process.paused and self.feed(settled))  # type: ignore[func-returns-value]
            if process.paused:
                process.owed.append((view, phase))

    def _complain(self) -> None:
        """Ranks that have waited a whole step deadline for a peer say so."""
        for process in list(self.processes.values()):
            if not process.running or process.view is None:
                process.blocked_before = ()
                continue
            blocked = tuple(p for p in process.view.active if not self._hears(process, p))
            again = tuple(p for p in blocked if p in process.blocked_before)
            process.blocked_before = blocked
            if again:
                event = Suspected(
                    process.rank, process.incarnation, process.view.epoch, again, "step deadline"
                )
                self.feed(event)

    def _hears(self, process: SimRank, peer: int) -> bool:
        assert process.view is not None
        for host in self.world.hosts.values():
            other = host.processes.get(peer)
            if other is not None and other.incarnation == process.view.incarnations[peer] and other.alive:
                return not other.paused and (host.name, self.name) not in self.world.blocked
        return False

    # The store.

    def _call(
        self, kind: str, action: Callable[[], Any], answer: Callable[[Any], None], lost: Callable[[], None]
    ) -> None:
        done = False

        def once(then: Callable[[], None]) -> None:
            nonlocal done
            if not done:
                done = True
                then()

        def answered(result: Any) -> None:
            self._do(lambda: once(lambda: answer(result)))

        def give_up() -> None:
            if not done:
                self._node = self.world.random.choice(NODES)
            once(lost)

        self.world.request(self.name, self._node, action, answered, kind)
        self._later(ANSWER_WITHIN, give_up)

    def _propose(self, effect: Propose) -> None:
        serial = effect.instance.serial

        def answer(swap: Any) -> None:
            entry = swap.entry
            found = (entry.value, entry.version) if entry else (None, 0)
            self.feed(Proposed(serial, swap.done, *found))

        def lost() -> None:
            self.feed(Proposed(serial, None))
            self._read_instance()

        store = self.world.store
        self._call(
            "propose",
            lambda: store.compare_and_swap(INSTANCE_KEY, effect.expected, effect.instance),
            answer,
            lost,
        )

    def _read_instance(self) -> None:
        self._call(
            "read",
            lambda: self.world.store.get(INSTANCE_KEY),
            lambda entry: self.feed(
                InstanceSeen(entry.value, entry.version) if entry else InstanceSeen(None, 0)
            ),
            self._read_instance,
        )

    def _watch_instance(self) -> None:
        name, node = f"{self.name}:instance:{id(self)}", self._node

        def seen(change: Change[Any]) -> None:
            self._do(lambda: self.feed(InstanceSeen(change.value, change.version)))

        def broken() -> None:
            self._do(lambda: self._later(0.2, self._watch_instance))

        def listed(entry: Any) -> None:
            self.feed(InstanceSeen(entry.value, entry.version) if entry else InstanceSeen(None, 0))

        def subscribe() -> Any:
            self.world.watch(name, node, INSTANCE_KEY, seen, broken)
            return self.world.store.get(INSTANCE_KEY)

        self._call("watch-instance", subscribe, listed, lambda: self._later(0.2, self._watch_instance))

    def _list_reports(self) -> None:
        scope, node = self._watched, self._node
        self._watch_number += 1
        number = self._watch_number
        prefix = HOST_PREFIX + ("" if scope == EVERY_HOST else scope)

        def seen(change: Change[Any]) -> None:
            self._do(
                lambda: self.feed(ReportSeen(change.key[len(HOST_PREFIX) :], change.value, change.version))
            )

        def again() -> None:
            if number == self._watch_number:
                self._later(0.2, lambda: number == self._watch_number and self._list_reports())  # type: ignore[func-returns-value]

        def subscribe() -> Any:
            self.world.watch(f"{self.name}:reports:{id(self)}", node, prefix, seen, lambda: self._do(again))
            return self.world.store.scan(prefix), self.world.store.revision

        def listed(result: Any) -> None:
            if number == self._watch_number:
                entries, revision = result
                reports = {key[len(HOST_PREFIX) :]: entry.value for key, entry in entries.items()}
                self.feed(ReportsListed(reports, scope, revision))

        self._call("watch-reports", subscribe, listed, again)

    # The lease.

    def _beat(self) -> None:
        """Renew the lease, let go when it is no longer certain, and let the ranks take a step."""
        if self._lease is not None and self.clock - self._renewed > CERTAIN_FOR:
            self._let_go()
        if self._lease is None:
            self._register()
        else:
            lease, asked = self._lease, self.clock

            def renewed(stands: bool) -> None:
                if lease != self._lease:
                    return
                if stands:
                    self._renewed = asked
                else:
                    self._let_go()

            store, world = self.world.store, self.world
            self._call("keep-alive", lambda: store.keep_alive(lease, world.now), renewed, lambda: None)
        self._complain()
        self._later(STEP_DEADLINE, self._beat)

    def _let_go(self) -> None:
        self._lease = None
        self.feed(LeaseLost())

    def _register(self) -> None:
        if self._registering:
            return
        self._registering = True
        asked = self.clock
        store, world, key = self.world.store, self.world, HOST_PREFIX + self.name

        def failed() -> None:
            self._registering = False

        def granted(found: Any) -> None:
            lease, entry = found
            if entry is not None and entry.value.ident != self.state.ident:
                failed()  # the name is somebody else's until their lease ends
                return
            version, report = entry.version if entry else 0, report_of(self.state)
            self._call(
                "register", lambda: self._put(version, report, lease), lambda s: held(lease, s), failed
            )

        def held(lease: int, swap: Any) -> None:
            self._registering = False
            if swap is not None and swap.done:
                self._lease, self._host_key_version, self._renewed = lease, swap.entry.version, asked
                self.feed(LeaseHeld())
                self._watched = wanted_scope(self.state)
                self._list_reports()
                self._read_instance()

        self._call("grant", lambda: (store.grant(LEASE_TTL, world.now), store.get(key)), granted, failed)

    def _put(self, expected: int, report: Report, lease: int) -> Any:
        try:
            return self.world.store.compare_and_swap(HOST_PREFIX + self.name, expected, report, lease)
        except LeaseEndedError:
            return None

    def _publish(self) -> None:
        if self._publishing or self._report is None or self._lease is None:
            return
        self._publishing = True
        report, lease, expected = self._report, self._lease, self._host_key_version

        def answered(swap: Any) -> None:
            self._publishing = False
            if lease != self._lease:
                self._publish()
            elif swap is None or swap.entry is None or swap.entry.value.ident != self.state.ident:
                self._let_go()
            else:
                self._host_key_version = swap.entry.version
                if not swap.done or self._report is not report:
                    self._publish()

        def lost() -> None:
            self._publishing = False
            self._later(0.1, self._publish)

        self._call("publish", lambda: self._put(expected, report, lease), answered, lost)
