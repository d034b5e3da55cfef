"""The supervisor: one per host. It starts its ranks, sees them end, and does what
:func:`eep.membership.step` says.

It decides nothing. Evidence comes in (a pidfd, a rank's word, the store, a timer, an operator), becomes an
event, and the core answers with effects, which are carried out here in order; the first of them, when a
rank dies, is the store to each survivor's control page that ends its waits. Nothing here ever waits for a
rank.

Run it in the main thread of a process of its own (or of the server's launcher). If that process is killed,
its keeper ends the ranks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from eep import faults
from eep.access import make_private
from eep.control.launch.processes import Launcher, Processes, SubprocessLauncher
from eep.control.launch.spare_launcher import SpareLauncher
from eep.control.private_directory import CONTROL_DIRECTORY, PrivateDirectory
from eep.control.store.embedded_store import EmbeddedStore, Store
from eep.control.store.store_driver import StoreDriver
from eep.control.supervisor import answers
from eep.control.supervisor.front_desk import ControlPage, Front
from eep.control.supervisor.keeper_process import Keeper
from eep.control.wire.messages import AskOperation, Message, TellView
from eep.faults import orders
from eep.membership import (
    Action,
    Effect,
    Event,
    Exited,
    Fence,
    Instance,
    Launch,
    ListReports,
    Local,
    Notify,
    OperatorAsked,
    Policy,
    Propose,
    Publish,
    Reject,
    Revoke,
    SetTimer,
    State,
    Status,
    StopAsked,
    Transition,
    initial_state,
    report_of,
    step,
    wanted_scope,
)
from eep.observe.event_log import EventLog
from eep.view import View

LEASE_TTL = 10.0
STOPS_WITHIN = 30.0
_GONE = ("DYING", "FENCING", "EXITED")
"""Transitions after which nothing more is to be expected of a life."""


def open_shared_page(descriptor: int) -> ControlPage:
    """The data plane's control page behind a descriptor. Loaded when the first rank brings one."""
    from eep.data_plane.control_page import SharedControlPage

    return SharedControlPage(descriptor)


def _with_standby(state: State, standby: Sequence[int]) -> State:
    resting = {rank: Local(Status.DOWN, keep=False) for rank in standby}
    return replace(state, ranks={**state.ranks, **resting})


class Supervisor:
    """``command`` is what every rank runs, or a launcher of ranks; a rank finds itself in its environment.

    ``standby`` are ranks of this host that run only when an operator asks for them. A directory that was not given is
    made, and removed in the end; ``remove_directory`` says otherwise. ``marks``: variables (``NAME=VALUE``) by which ranks
    are known that are forked from a process which was started before the directory had a name.
    """

    def __init__(
        self,
        command: Sequence[str] | Launcher,
        ranks: Sequence[int],
        *,
        max_ranks: int,
        standby: Sequence[int] = (),
        host: str = "localhost",
        policy: Policy | None = None,
        store: Store | None = None,
        directory: Path | None = None,
        remove_directory: bool | None = None,
        key: bytes | None = None,
        environment: Mapping[str, str] | None = None,
        marks: Sequence[str] = (),
        lease_ttl: float = LEASE_TTL,
        open_page: Callable[[int], ControlPage] = open_shared_page,
    ) -> None:
        policy = policy or Policy(max_ranks=max_ranks)
        self.ident = f"{host}#{secrets.token_hex(4)}"
        self.state = _with_standby(initial_state(self.ident, (*ranks, *standby), policy), standby)
        self.rejected: Counter[str] = Counter()
        self.last_rejection = ""
        self._store = store or EmbeddedStore()
        self._removes_directory = directory is None if remove_directory is None else remove_directory
        self.directory = PrivateDirectory.create(directory, key)
        make_private(self.directory.ranks)
        self._events = EventLog(self.directory.events, host)
        self._front = Front(self.directory.socket, self.directory.key(), self, open_page)
        variables = {**(environment or {}), CONTROL_DIRECTORY: str(self.directory.path)}
        launcher = SubprocessLauncher(command) if isinstance(command, Sequence) else command
        self._processes = Processes(launcher, variables, self._exited)
        self._driver = StoreDriver(
            self._store,
            self.ident,
            lease_ttl,
            feed=self.feed,
            reject=self.reject,
            report=lambda: report_of(self.state),
        )
        self._timers: set[asyncio.TimerHandle] = set()
        self._keeper: Keeper | None = None
        self._marks = tuple(marks)
        self._changed = asyncio.Event()
        self._stopped = False
        self._watchers: list[Callable[[Effect], None]] = []
        self._spares = launcher if isinstance(launcher, SpareLauncher) else None
        if self._spares is not None:
            self._spares.follow(self.watch_effects, self.note)

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
        self._keeper = Keeper(self.directory.path, self._marks, removes=self._removes_directory)
        self._front.listen()
        self._driver.start()

    async def stop(self) -> None:
        """End every rank, tell the others, remove what was made. Doing it again does nothing."""
        if self._stopped:
            return
        self._stopped = True
        self.feed(StopAsked())
        try:
            await asyncio.wait_for(self.wait_until(lambda: self._processes.all_ended), STOPS_WITHIN)
        except TimeoutError:
            self.reject("stuck", f"processes {self._processes.pids} do not end even when killed")
        await self._processes.close()
        await self._driver.stop()
        await self._store.close()
        for timer in self._timers:
            timer.cancel()
        self._front.close()
        self._events.close()
        faults.obey(None)
        if self._removes_directory:
            self.directory.remove()
        if self._keeper is not None:
            await self._keeper.end()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when ``condition`` holds; it is looked at after every event. The caller sets the deadline."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def watch_effects(self, watcher: Callable[[Effect], None]) -> None:
        """Call ``watcher`` with every effect, after it was carried out."""
        self._watchers.append(watcher)

    # The core, and what it asks for.

    @property
    def instance(self) -> Instance | None:
        """The committed record, as far as this host has seen it."""
        return self.state.instance

    @property
    def pids(self) -> dict[int, int]:
        return self._processes.pids

    def feed(self, event: Event) -> None:
        self.state, effects = step(self.state, event)
        for effect in effects:
            self._carry_out(effect)
            for watcher in self._watchers:
                watcher(effect)
        self._driver.watch_scope(wanted_scope(self.state))
        self._changed.set()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Revoke():
                faults.at("supervisor.evidence")
                self._front.revoke(effect.epoch, effect.reason)
            case Propose():
                self._pass_points_of(effect.instance.view)
                self._driver.propose(effect)
            case Publish():
                self._driver.publish(effect.report)
            case ListReports():
                self._driver.list_reports()
            case Fence():
                self._processes.fence(effect.rank, effect.incarnation)
            case Launch():
                faults.at("supervisor.before_launch")
                self._processes.launch(effect.rank, effect.incarnation)
            case Notify():
                faults.at("supervisor.before_notify")
                epoch, message = self.standing()
                if message is not None:
                    self._front.tell(message, epoch)
            case SetTimer():
                self._set_timer(effect)
            case Reject():
                self.reject(effect.kind, effect.reason)
            case Transition():
                self._events.write(
                    effect.phase,
                    effect.epoch,
                    effect.cause,
                    rank=effect.rank,
                    incarnation=effect.incarnation,
                    evidence=effect.evidence,
                    operation=effect.operation,
                )
                if effect.phase in _GONE:
                    self._front.tell_gone(effect.rank, effect.incarnation, effect.cause, max(effect.epoch, 0))

    def _pass_points_of(self, proposed: View) -> None:
        committed = self.state.instance.view if self.state.instance else None
        if committed is None or proposed.epoch == committed.epoch:
            return  # the same ranks: another phase of the same view, or permission to launch
        admits = set(proposed.active) - set(committed.active)
        faults.at("supervisor.before_admit" if admits else "supervisor.before_commit")

    def _set_timer(self, effect: SetTimer) -> None:
        def fire() -> None:
            self._timers.discard(handle)
            self.feed(effect.deadline)

        handle = asyncio.get_running_loop().call_later(effect.delay, fire)
        self._timers.add(handle)

    def _exited(self, rank: int, incarnation: int, evidence: str, clean: bool) -> None:
        self.feed(Exited(rank, incarnation, evidence, clean))
        self._front.forget(rank)

    # What the front asks.

    def reject(self, kind: str, reason: str) -> None:
        self.rejected[kind] += 1
        if reason != self.last_rejection:  # a store that stays away would fill the log with one sentence
            self._events.write("REJECTED", self.state.epoch, reason, operation=kind)
        self.last_rejection = reason

    def note(self, phase: str, cause: str, rank: int = -1, incarnation: int = -1, evidence: str = "") -> None:
        """A line in the event log about something that changes no membership."""
        self._events.write(phase, self.state.epoch, cause, rank=rank, incarnation=incarnation, evidence=evidence)
        self._changed.set()

    def why_not_registered(self, rank: int, incarnation: int) -> str | None:
        return answers.why_not_registered(self.state, rank, incarnation)

    def standing(self) -> tuple[int, Message | None]:
        if self.state.instance is None:
            return 0, None
        view = self.state.instance.view
        return view.epoch, TellView(view.active, view.incarnations, self.state.instance.phase.value)

    def operate(self, request: AskOperation) -> str | None:
        if (refusal := answers.why_not(self.state, request)) is not None:
            self.reject(refusal.kind, refusal.reason)
            return refusal.reason
        self.feed(OperatorAsked(request.operation, Action(request.action), request.rank))
        return None

    def status(self) -> str:
        """The state of this host as JSON, for an operator."""
        told = {
            "supervisor": self.ident,
            "pid": os.getpid(),
            **answers.describe(self.state, self.pids),
            "spares": self._spares.status() if self._spares else None,
            "rejected": dict(self.rejected),
            "last_rejection": self.last_rejection,
        }
        return msgspec.json.encode(told).decode()
