"""A simulated host: the real core, driven by virtual time over the simulated network."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from eep.control.supervisor.stall_watch import StallWatch
from eep.membership import (
    Deadline,
    Effect,
    Event,
    Exited,
    Fence,
    Launch,
    ListReports,
    Notify,
    Policy,
    Propose,
    Publish,
    PulseStopped,
    Ready,
    Reject,
    Revoke,
    SetTimer,
    Settled,
    Stalled,
    Suspected,
    initial_state,
    step,
    wanted_scope,
)
from eep.view import View
from tests.membership.sim.links import SimLinks
from tests.membership.sim.rank import SimRank
from tests.membership.sim.store_client import StoreClient
from tests.membership.sim.world import World

STEP_DEADLINE = 1.0


class SimHost:
    def __init__(
        self, world: World, name: str, ident: str, ranks: tuple[int, ...], policy: Policy, *, linked: bool = False
    ) -> None:
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
        self.on_stalled: Callable[[SimRank], None] = lambda rank: None
        self._backlog: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Deadline]] = []
        world.hosts[name] = self
        self.was_irregular = False
        """Its clock jumped, or it was paused: what it relied on may have ended without its knowledge."""
        self.store = StoreClient(self)
        self.links: SimLinks | None = SimLinks(self) if linked else None
        self._stalls = StallWatch(self, self._progress_of)
        self._beat()
        if policy.stall_deadline > 0:
            self._look()

    # Time, as this host sees it.

    @property
    def clock(self) -> float:
        return self.world.now + self.clock_offset

    def jump_clock(self, seconds: float) -> None:
        self.clock_offset += seconds
        self.was_irregular = True
        self.later(0, self._check_timers)

    def later(self, delay: float, action: Callable[[], None]) -> None:
        self.world.at(delay, lambda: self.do(action))

    def do(self, action: Callable[[], None]) -> None:
        """Run now, or when the host is resumed, or never if it is dead."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.append(action)
        else:
            action()

    def pause(self) -> None:
        self.paused = self.was_irregular = True

    def resume(self) -> None:
        self.paused = False
        while self._backlog and self.alive and not self.paused:
            self._backlog.popleft()()

    def kill(self) -> None:
        """The host is lost, and every process on it."""
        self.alive = False
        for process in self.processes.values():
            process.alive = False

    def _check_timers(self) -> None:
        due = [deadline for when, deadline in self._timers if when <= self.clock]
        self._timers = [(when, deadline) for when, deadline in self._timers if when > self.clock]
        for deadline in due:
            self.feed(deadline)

    # The core.

    def feed(self, event: Event) -> None:
        if not self.alive:
            return
        if isinstance(event, Stalled):
            self.on_stalled(self.processes[event.rank])
        self.state, effects = step(self.state, event)
        for effect in effects:
            self._carry_out(effect)
        if self.links is not None:
            self.links.tell()
        self.store.watch_scope(wanted_scope(self.state))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Revoke():
                for process in self.processes.values():
                    process.revoked = max(process.revoked, effect.epoch)
            case Propose():
                self.store.propose(effect)
            case Publish():
                self.store.publish(effect.report)
            case ListReports():
                self.store.list_reports()
            case Fence():
                self.later(0.01, lambda: self._end(effect.rank, effect.incarnation, "SIGKILL"))
            case Launch():
                self._launch(effect.rank, effect.incarnation)
            case Notify():
                for process in list(self.processes.values()):
                    self.later(0.001, partial(self._tell, process, effect))
            case SetTimer():
                self._timers.append((self.clock + effect.delay, effect.deadline))
                self.later(effect.delay + 1e-6, self._check_timers)
            case Reject():
                self.rejects[effect.kind] += 1

    # Processes.

    def _launch(self, rank: int, incarnation: int) -> None:
        process = SimRank(rank, incarnation, self.name, progressed_at=self.world.now)
        old = self.processes.get(rank)
        assert old is None or not old.alive, f"rank {rank} was launched while incarnation {old} still ran"
        self.processes[rank] = process
        self.on_launch(process)
        start = self.world.random.uniform(*self.launch_time)
        if self.world.random.random() < self.crash_at_start:
            self.later(start, lambda: self._end(rank, incarnation, "crashed at start"))
        else:
            self.later(start, lambda: self._say(process, Ready(rank, incarnation)))

    def _end(self, rank: int, incarnation: int, evidence: str) -> None:
        process = self.processes.get(rank)
        if process is not None and process.incarnation == incarnation and process.alive:
            if evidence == "SIGKILL" and process.unkillable:
                return
            process.alive = False
            self.later(0.001, lambda: self.feed(Exited(rank, incarnation, evidence)))

    def crash(self, rank: int) -> None:
        process = self.processes.get(rank)
        if process is not None and process.alive:
            # The process is gone at once; its supervisor sees it when it can.
            process.alive = False
            if self.world.random.random() < 0.5:  # some take long to be cleared up after
                self.do(lambda: self.feed(PulseStopped(rank, process.incarnation)))
                self.later(
                    self.world.random.uniform(0, 2), lambda: self.feed(Exited(rank, process.incarnation, "crashed"))
                )
            else:
                self.do(lambda: self.feed(Exited(rank, process.incarnation, "crashed")))

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
            self.later(repair, lambda: self._say(process, settled))

    def _say(self, process: SimRank, event: Event) -> None:
        """A rank speaks to its supervisor, unless it cannot."""
        if process.alive and not process.paused:
            self.feed(event)

    def _beat(self) -> None:
        self.store.renew_lease()
        self._complain()
        self._check_timers()  # a clock that jumped back has put some off
        self.later(STEP_DEADLINE, self._beat)

    def _look(self) -> None:
        self._stalls.look(self.clock)
        self.later(self._stalls.pause, self._look)

    def _progress_of(self, rank: int) -> int | None:
        """A rank makes progress unless it hangs, or waits for a peer."""
        process = self.processes.get(rank)
        if process is None:
            return None
        if process.alive and not process.paused and not (process.running and self._awaited(process)):
            process.progress(self.world.now)
        return process.word

    def _complain(self) -> None:
        """Ranks that have waited a whole step deadline for a peer say so."""
        for process in list(self.processes.values()):
            if not process.running or process.view is None:
                process.blocked_before = ()
                continue
            blocked = self._awaited(process)
            again = tuple(p for p in blocked if p in process.blocked_before)
            process.blocked_before = blocked
            if again:
                event = Suspected(process.rank, process.incarnation, process.view.epoch, again, "step deadline")
                self.feed(event)

    def _awaited(self, process: SimRank) -> tuple[int, ...]:
        """The peers for which a rank that runs waits in vain."""
        assert process.view is not None
        return tuple(peer for peer in process.view.active if not self._hears(process, peer))

    def _hears(self, process: SimRank, peer: int) -> bool:
        assert process.view is not None
        for host in self.world.hosts.values():
            other = host.processes.get(peer)
            if other is not None and other.incarnation == process.view.incarnations[peer] and other.alive:
                return not other.paused and (host.name, self.name) not in self.world.blocked
        return False
