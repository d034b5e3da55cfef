"""The supervisor: one per host. It starts its ranks, sees them end, and does what
:func:`eep.membership.step` says.

It decides nothing. Evidence (a pidfd, a message of a rank, the store, a timer, an operator) becomes an event,
and the core answers with effects, which the supervisor carries out in order. When a rank dies, the first
effect is a write to each survivor's control page, which ends the survivor's waits. The supervisor never waits
for a rank.

Run it in the main thread of a process of its own (or of the server's launcher). If that process is killed,
its keeper ends the ranks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from eep import faults
from eep.access import make_private
from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.processes import Launcher, Processes, SubprocessLauncher, require_pidfds
from eep.control.launch.spare_launcher import SpareLauncher
from eep.control.private_directory import CONTROL_DIRECTORY, PrivateDirectory
from eep.control.store.embedded_store import EmbeddedStore
from eep.control.store.store_driver import StoreDriver
from eep.control.supervisor import answers
from eep.control.supervisor.effect_carrier import EffectCarrier
from eep.control.supervisor.front_desk import FrontDesk, RevocablePage, open_shared_page
from eep.control.supervisor.journal import Journal
from eep.control.supervisor.keeper import sweep
from eep.control.supervisor.keeper_process import KeeperProcess
from eep.control.supervisor.memory_release import MemoryRelease
from eep.control.supervisor.other_hosts import OtherHosts
from eep.control.supervisor.rank_since import RankSince
from eep.control.supervisor.rank_watches import RankWatches
from eep.control.supervisor.room_watch import RoomWatch
from eep.control.supervisor.settings import DirectorySettings, LaunchSettings, LinkSettings, StoreSettings
from eep.control.supervisor.timers import DeadlineTimers
from eep.control.wire.messages import ASKED_BEFORE, AskEvidence, AskOperation, ControlMessage, TellAnswer, TellView
from eep.faults import orders
from eep.membership import (
    Effect,
    Event,
    Exited,
    HostState,
    InstanceRecord,
    LocalRank,
    Policy,
    RankStatus,
    StopAsked,
    initial_state,
    report_of,
    step,
    wanted_scope,
)
from eep.observe.change_summary import ChangeReport

STOPS_WITHIN = 30.0


def _with_standby(state: HostState, standby: Sequence[int]) -> HostState:
    resting = {rank: LocalRank(RankStatus.DOWN, keep=False) for rank in standby}
    return replace(state, ranks={**state.ranks, **resting})


class Supervisor:
    """``command`` is what every rank runs, or a launcher of ranks. A rank finds its number in its environment.

    ``standby`` are ranks of this host that run only when an operator asks for them. ``open_page`` opens the
    control page behind a descriptor that a rank sent. ``links`` join the supervisors of several hosts that share a store.
    """

    def __init__(
        self,
        command: Sequence[str] | Launcher,
        ranks: Sequence[int],
        policy: Policy,
        *,
        standby: Sequence[int] = (),
        host: str = "localhost",
        launch: LaunchSettings | None = None,
        directory: DirectorySettings | None = None,
        store: StoreSettings | None = None,
        links: LinkSettings | None = None,
        open_page: Callable[[int], RevocablePage] = open_shared_page,
    ) -> None:
        require_pidfds()
        launch = launch or LaunchSettings()
        directory = directory or DirectorySettings()
        store = store or StoreSettings()
        self.ident = f"{host}#{secrets.token_hex(4)}"
        self.state = _with_standby(initial_state(self.ident, (*ranks, *standby), policy), standby)
        self._store = store.store or EmbeddedStore()
        self._removes_directory = directory.is_removed
        self.directory = PrivateDirectory.create(directory.path, directory.key)
        make_private(self.directory.ranks)
        self.journal = Journal(self.directory.events, host)
        self._front_desk = FrontDesk(self.directory.socket, self.directory.key(), self, open_page)
        variables = {**launch.environment, CONTROL_DIRECTORY: str(self.directory.path)}
        launcher = SubprocessLauncher(command) if isinstance(command, Sequence) else command
        room = RoomWatch(self.directory.ranks, self.note)
        self._keeper = KeeperProcess(self.directory.path, launch.marks, self.note, removes=self._removes_directory)
        self._processes = Processes(launcher, variables, self._exited, room.wait, self._keeper)
        self._others = OtherHosts(self, links, note=self.note, reject=self.reject)
        self._driver = StoreDriver(
            self._store,
            self.ident,
            store.lease_ttl,
            feed=self.feed,
            reject=self.reject,
            report=lambda: report_of(self.state),
            lease_changed=self._others.lease_changed,
        )
        self._timers = DeadlineTimers(self.feed)
        self._carrier = EffectCarrier(
            self._front_desk,
            self._processes,
            self._driver,
            self._timers,
            self.journal,
            standing=self.standing,
            committed=lambda: self.state.instance.view if self.state.instance else None,
            reject=self.reject,
        )
        self._watches = RankWatches(self, self._front_desk, lambda: self.pids)
        self._since = RankSince()
        self._changed = asyncio.Event()
        self._shown: dict[str, Callable[[], Any]] = {}
        self._stopped = False
        release = MemoryRelease(self.directory.path, lambda rank: answers.comes_back(self.state, rank))
        self._watchers: list[Callable[[Effect], None]] = [release.follow]
        self._spares = launcher if isinstance(launcher, SpareLauncher) else None
        if self._spares is not None:
            self._spares.follow(self.watch_effects, self.note)
        forks = launcher if self._spares is None else self._spares.forks
        self._forks = forks if isinstance(forks, ForkLauncher) else None
        if self._forks is not None:
            self._forks.tell(self.note)

    # Life.

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then end with all ranks."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await self.start()
        try:
            await stop.wait()
        finally:
            await self.stop()

    async def start(self) -> None:
        orders.obey_in(self.directory.path, None)
        self._keeper.start()
        self._front_desk.listen()
        self._others.start(self.ident, self._store, self._driver)
        self._driver.start()
        self._watches.start()

    async def stop(self) -> None:
        """End every rank, tell the others, remove what was made. Doing it again does nothing."""
        if self._stopped:
            return
        self._stopped = True
        self._watches.cancel()
        self.feed(StopAsked())
        try:
            await asyncio.wait_for(self.wait_until(lambda: self._processes.all_ended), STOPS_WITHIN)
        except TimeoutError:
            self.reject(
                "stuck", f"processes {self._processes.pids} were killed but do not end; the keeper is left with them"
            )
        await self._processes.close()
        await self._others.stop()
        await self._driver.stop()
        await self._store.close()
        self._timers.cancel()
        await self._front_desk.close()
        self.journal.close()
        faults.obey(None)
        sweep(str(self.directory.path))
        if self._removes_directory:
            self.directory.remove()
        await self._keeper.end()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when ``condition`` holds; it is looked at after every event. The caller sets the deadline."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def watch_effects(self, watcher: Callable[[Effect], None]) -> None:
        """Call ``watcher`` with every effect, after it was carried out."""
        self._watchers.append(watcher)

    def watch_reports(self, watcher: Callable[[ChangeReport], None]) -> None:
        """Call ``watcher`` with what ranks and the front end tell of their part in a change."""
        self._front_desk.report_watchers.append(watcher)

    def show(self, name: str, part: Callable[[], Any]) -> None:
        """Have the status say this, too."""
        self._shown[name] = part

    # The core, and what it asks for.

    @property
    def instance(self) -> InstanceRecord | None:
        """The committed record, as far as this host has seen it."""
        return self.state.instance

    @property
    def pids(self) -> dict[int, int]:
        return self._processes.pids

    @property
    def keeper_pid(self) -> int | None:
        """None while there is no keeper."""
        return self._keeper.pid

    def feed(self, event: Event) -> None:
        self.state, effects = step(self.state, event)
        for effect in effects:
            self._carrier.carry_out(effect)
            for watcher in self._watchers:
                watcher(effect)
        self._others.tell()
        self._driver.watch_scope(wanted_scope(self.state))
        self._since.follow(self.state)
        self._changed.set()

    def _exited(self, rank: int, incarnation: int, evidence: str, clean: bool) -> None:
        self.feed(Exited(rank, incarnation, evidence, clean))
        self._front_desk.forget(rank)

    # What the front asks.

    def reject(self, kind: str, reason: str) -> None:
        self.journal.rejection(kind, self.state.epoch, reason)

    def note(self, phase: str, cause: str, rank: int = -1, incarnation: int = -1, evidence: str = "") -> None:
        self.journal.note(phase, self.state.epoch, cause, rank, incarnation, evidence)
        self._changed.set()

    def why_not_registered(self, rank: int, incarnation: int) -> str | None:
        return answers.why_not_registered(self.state, rank, incarnation)

    def standing(self) -> tuple[int, ControlMessage | None]:
        if self.state.instance is None:
            return 0, None
        view = self.state.instance.view
        return view.epoch, TellView(view.active, view.incarnations, self.state.instance.phase.value)

    def operate(self, request: AskOperation | AskEvidence) -> TellAnswer:
        if request.operation in self.state.operations:
            return TellAnswer(True, ASKED_BEFORE)
        if (refusal := answers.why_not_done(self.state, request)) is not None:
            self.reject(refusal.kind, refusal.reason)
            return TellAnswer(False, refusal.reason)
        self.feed(answers.event_of(request))
        return TellAnswer(True, "done")

    def status(self) -> str:
        """The state of this host as JSON, for an operator."""
        told = {
            "supervisor": self.ident,
            "pid": os.getpid(),
            **answers.describe_host(self.state, self.pids, self._watches.still_for, self._since.times),
            "spares": self._spares.status() if self._spares else None,
            "fork_servers": [self._forks.server_pid, self._forks.copy_pid] if self._forks else None,
            "links": self._others.status(),
            "rejected": dict(self.journal.rejected),
            "last_rejection": self.journal.last_rejection,
            **{name: part() for name, part in self._shown.items()},
        }
        return msgspec.json.encode(told).decode()
