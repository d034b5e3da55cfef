"""In the data-parallel controller: the supervisor of the ranks lives here, and no send ever waits for a rank.

The supervisor starts schedulers from launch records (:mod:`sglang_patches.server.launch_records`): the first of them now,
the others when an operator asks for them, and each again whenever it dies.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.processes import Launcher, SubprocessLauncher, command_of
from eep.control.launch.refill import Refill
from eep.control.launch.spare_launcher import SpareLauncher
from eep.control.supervisor.background import BackgroundSupervisor
from eep.control.supervisor.settings import DirectorySettings, LaunchSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import Effect, Launch, Notify, Policy, RankGone
from eep.membership.state import HostState
from eep.observe.metrics import InstanceMetrics
from eep.view import NEVER
from sglang_patches import cpu, expert_backup, garbage_collector, hooks, options, recipe
from sglang_patches.addressed_life import life_of
from sglang_patches.cuda import spare_preparation as gpu_preload
from sglang_patches.options import DIRECTORY, ServerOptions
from sglang_patches.rank import rank_process
from sglang_patches.server import controller_process, launcher, resignation, server_store
from sglang_patches.server.launch_records import LaunchRecorder

logger = logging.getLogger(__name__)

_CONTROLLER = "managers.data_parallel_controller.DataParallelController."
_ATTRIBUTE = "_eep_ranks"
_PROCESS = launcher.ChildProcess(controller_process.__name__, "run")
_POLLS_EVERY_MS = 50
_LOOKS_EVERY = 0.05
_LOADED_WITHIN = 3600.0
_FAILS_AT_START = 3
PRELOAD = ("sglang_patches.server.preload", "sglang_patches.rank.rank_process")


def policy(wanted: ServerOptions) -> Policy:
    """Patient with a rank that keeps dying, as long as it lives for a while in between; and with one that loads a large
    model."""
    return Policy(
        max_ranks=wanted.max_ranks,
        first_view=wanted.ranks,
        fewest_ranks=wanted.fewest_ranks if wanted.on_lost_coverage == "refuse" else 1,
        enough_ranks=wanted.fewest_ranks,
        relaunch_limit=options.relaunch_limit() if wanted.relaunch else 0,
        relaunch_backoff=0.1,
        longest_backoff=5.0,
        stable_after=10.0,
        start_deadline=_LOADED_WITHIN,
        settle_deadline=wanted.repair_timeout_s,
        stall_deadline=wanted.stall_timeout_s,
    )


class LiveRanks:
    """Which ranks the controller may send to, from the effects of the supervisor.

    The supervisor's thread writes and the event loop reads: ``live`` is replaced whole, never changed.
    """

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        """The incarnation of every rank that is in and not gone."""
        self.ended: deque[int] = deque()
        """Ranks with a life that ended, which the event loop has not seen yet."""
        self._gone: dict[int, int] = {}
        """The last incarnation of each rank whose end was seen."""

    def has_ended(self, rank: int, life: int) -> bool:
        return life <= self._gone.get(rank, NEVER)

    def follow(self, effect: Effect) -> None:
        match effect:
            case Notify(view=view):
                lives = {rank: view.incarnations[rank] for rank in view.active}
                self.live = {rank: life for rank, life in lives.items() if life > self._gone.get(rank, NEVER)}
            case RankGone(rank=rank):
                self._gone[rank] = effect.incarnation
                self.live = {each: life for each, life in self.live.items() if each != rank}
                self.ended.append(rank)
            case Launch(rank=rank) if rank in self._gone:
                # What was sent to the rank after its end was for the life that ended, too.
                self.ended.append(rank)


class ServerRanks:
    """The supervisor of this server's ranks, and which of them are live.

    The server starts with the first of them; an operator may ask for the others.
    """

    def __init__(self, directory: Path, wanted: ServerOptions) -> None:
        self.directory, self._wanted = directory, wanted
        self.lives = LiveRanks()
        self._judged: HostState | None = None
        self._background = BackgroundSupervisor(self._make)
        self._background.start()
        self._backup = expert_backup.start(directory, options.required().backup)

    def _make(self) -> Supervisor:
        wanted = self._wanted
        supervisor = Supervisor(
            _launcher(),
            range(wanted.ranks),
            policy(wanted),
            standby=range(wanted.ranks, wanted.max_ranks),
            launch=LaunchSettings(
                marks=tuple(f"{name}={os.environ[name]}" for name in [launcher.FORKED] if name in os.environ)
            ),
            directory=DirectorySettings(self.directory, remove=True),
            store=StoreSettings(server_store.open_store(wanted.store)),
        )
        supervisor.watch_effects(self.lives.follow)
        supervisor.watch_effects(InstanceMetrics())
        return supervisor

    def pid(self, rank: int) -> int | None:
        return self._background.call(lambda supervisor: supervisor.pids.get(rank))

    def wait_until_loaded(self, rank: int) -> Any:
        """The first message of a scheduler. A standby rank has none yet; it would say what rank 0 says.

        Raises when the rank cannot be started: a server that never served should end.
        """
        rank = rank if rank < self._wanted.ranks else 0
        path, deadline = rank_process.info_path(self.directory, rank), time.monotonic() + _LOADED_WITHIN
        while not path.exists():
            local = self._background.call(lambda supervisor: supervisor.state.ranks[rank])
            if local.failures >= _FAILS_AT_START or time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {rank} failed to start {local.failures} times; its output above says why, and so does "
                    f"'eep events --dir {self.directory}'"
                )
            time.sleep(_LOOKS_EVERY)
        return recipe.read(path)

    def why_to_resign(self) -> str | None:
        """Why the server will not serve again by itself, said once; None otherwise. The state is a value that the
        supervisor replaces, so that this thread may read it."""
        state = self._background.supervisor.state
        if state is self._judged:
            return None
        self._judged = state
        return resignation.why_to_resign(state.ranks, state.policy)

    def stop(self) -> None:
        if self._backup is not None:
            self._backup.stop()
        self._background.stop()


def _launcher() -> Launcher:
    """A process that has opened a GPU cannot be forked, and importing SGLang may open it; there, start afresh."""
    spares = options.required().spares
    if spares:
        warm = "" if cpu.is_asked_for() else gpu_preload.ENTRY
        refill = Refill(spares, free_cores=_free_cores())
        return SpareLauncher(rank_process.ENTRY, refill=refill, preload=PRELOAD, warm=warm)
    if cpu.is_asked_for():
        return ForkLauncher(rank_process.ENTRY, preload=PRELOAD, first=controller_process.fork_server)
    return SubprocessLauncher(command_of(cast(FunctionType, rank_process.main)))


def _free_cores() -> int:
    """Those that the ranks leave. On a CPU they leave none, and on a GPU each has one for its loop and one for the rest."""
    return 0 if cpu.is_asked_for() else len(os.sched_getaffinity(0)) - 2 * options.required().max_ranks


class Outbox:
    """Sends to schedulers without ever waiting. What cannot be sent at once is kept until it can, or its rank is gone."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._unsent: dict[int, deque[Any]] = {}
        self._sockets: dict[int, Any] = {}

    def __call__(self, socket: Any, message: Any, flags: int = 0) -> None:
        key = id(socket)
        self._sockets[key] = socket
        unsent = self._unsent.setdefault(key, deque())
        unsent.append(message)
        self._flush(key)

    def flush(self) -> None:
        for key in [key for key, unsent in self._unsent.items() if unsent]:
            self._flush(key)

    def forget(self, socket: Any) -> None:
        """Its rank is gone: the front end sends what it had anew, to others."""
        self._unsent.pop(id(socket), None)

    def _flush(self, key: int) -> None:
        import zmq

        unsent = self._unsent[key]
        while unsent:
            try:
                self._send(self._sockets[key], unsent[0], flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            unsent.popleft()


# The hooks.


def register() -> None:
    hooks.rebind("entrypoints.engine.run_data_parallel_controller_process", _PROCESS)
    hooks.hook(_CONTROLLER + "launch_tensor_parallel_group", _launch)
    hooks.hook(_CONTROLLER + "maybe_external_dp_rank_routing", _route, "replace")
    hooks.hook(_CONTROLLER + "event_loop", _event_loop, "replace")


def _launch(original: Callable[..., Any], controller: Any, *arguments: Any, **named: Any) -> Any:
    from sglang.srt.managers import data_parallel_controller as module

    directory, wanted = Path(os.environ[DIRECTORY]), options.required()

    def start(count: int) -> ServerRanks:
        if count != wanted.max_ranks:
            raise RuntimeError(f"SGLang would start {count} schedulers, but there are {wanted.max_ranks} ranks")
        ranks = ServerRanks(directory, wanted)
        setattr(controller, _ATTRIBUTE, ranks)
        return ranks

    real = module.mp
    module.mp = LaunchRecorder(directory, start)
    try:
        result = original(controller, *arguments, **named)
        # SGLang passes their process ids on; those that were not started have none.
        controller.scheduler_procs = [process for process in controller.scheduler_procs if process.pid is not None]
        return result
    finally:
        module.mp = real


def _route(controller: Any, request: Any) -> bool:
    """To the rank that the front end chose, which knows who is in. If it is gone by now, the front end knows that too."""
    from sglang.srt.managers import data_parallel_controller as module

    rank = request.routed_dp_rank
    if rank is None:
        return False
    life, ranks = life_of(request), getattr(controller, _ATTRIBUTE)
    if life is None or not ranks.lives.has_ended(rank, life):  # otherwise its next life would get the request
        module.sock_send(controller.workers[rank], request)
    return True


def outlive_failed_ranks() -> None:
    """A scheduler that fails signals its parent, which is us unless it was forked. It is started again, and we stay."""
    signal.signal(signal.SIGQUIT, lambda *_: logger.warning("a rank has failed; its output above says why"))


def _event_loop(controller: Any) -> None:
    import zmq
    from sglang.srt.managers import data_parallel_controller as module

    ranks: ServerRanks = getattr(controller, _ATTRIBUTE)
    outlive_failed_ranks()
    garbage_collector.freeze_this_process()
    outbox = Outbox(module.sock_send)
    module.sock_send = outbox
    poller = zmq.Poller()
    poller.register(controller.recv_from_tokenizer, zmq.POLLIN)
    has_resigned = False
    while True:
        controller.soft_watchdog.feed()
        if not has_resigned and (why := ranks.why_to_resign()):
            resignation.announce(ranks.directory, why)
            has_resigned = True
        mark_the_dead(controller, ranks.lives, outbox)
        outbox.flush()
        if not poller.poll(_POLLS_EVERY_MS):
            continue
        while True:
            try:
                request = module.sock_recv(controller.recv_from_tokenizer, flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            except Exception as error:
                # The front end checks what it sends; should something get past it, one request is lost and not the server.
                logger.error("the controller dropped a message of the front end that it cannot read: %s", error)
                continue
            mark_the_dead(controller, ranks.lives, outbox)
            if type(request).__name__ == "ShutdownReq":
                # Passed on, it would have every scheduler end on its own, and the supervisor would start it again.
                ranks.stop()
                raise SystemExit(0)  # SGLang would ask after its processes if we returned
            try:
                controller._request_dispatcher(request)
            except (ValueError, RuntimeError) as error:
                # Sent to a rank that is gone: the front end hears of that as well, and sends it again.
                logger.warning("a request was not dispatched, the front end sends it again: %s", error)


def mark_the_dead(controller: Any, ranks: LiveRanks, outbox: Outbox) -> None:
    """Follow every end and every view, before the next request is dispatched."""
    while ranks.ended:
        rank = ranks.ended.popleft()
        if rank < len(controller.workers) and controller.workers[rank] is not None:
            outbox.forget(controller.workers[rank])
    live = ranks.live
    controller.status = [rank in live for rank in range(len(controller.status))]
    controller._active_workers = [rank for rank in range(len(controller.workers)) if rank in live]
    controller._active_count_cache = len(controller._active_workers)
