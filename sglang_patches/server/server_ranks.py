"""The ranks of this server: their supervisor, which lives in a thread of the controller, and which of them are live.

The supervisor starts schedulers from launch records (:mod:`sglang_patches.server.launch_records`): the first of them now,
the others when an operator asks for them, and each again whenever it dies.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.kept_process import KeptProcess
from eep.control.launch.processes import Launcher, SubprocessLauncher, command_of
from eep.control.launch.refill import Refill
from eep.control.launch.spare import ForkedSpares, StartedSpares
from eep.control.launch.spare_launcher import SpareLauncher
from eep.control.private_directory import PrivateDirectory
from eep.control.store.embedded_store import RecordStore
from eep.control.supervisor.background import BackgroundSupervisor
from eep.control.supervisor.change_log import ChangeLog
from eep.control.supervisor.settings import DirectorySettings, LaunchSettings, LinkSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import Effect, Launch, Notify, Policy, RankGone
from eep.membership.state import HostState
from eep.observe.change_span import ChangeSpans
from eep.observe.metrics import InstanceMetrics
from eep.view import NEVER
from sglang_patches import cpu, expert_backup, options, recipe
from sglang_patches.cuda import spare_preparation as gpu_preload
from sglang_patches.options import ServerOptions
from sglang_patches.rank import rank_process, whole_spare
from sglang_patches.server import controller_process, device_watcher, launcher, resignation, server_store

_LOOKS_EVERY = 0.05
_LOADED_WITHIN = 3600.0
_FAILS_AT_START = 3
_STOPPED_WITHIN = 0.5
_PROCESS = "sglang_patches.rank.rank_process"
PRELOAD = ("sglang_patches.server.preload", _PROCESS)
IMPORTS = ("sglang_patches.server.rank_imports", _PROCESS)


def policy(wanted: ServerOptions) -> Policy:
    """Patient with a rank that keeps dying, as long as it lives for a while in between; and with one that loads a large
    model."""
    return Policy(
        max_ranks=wanted.max_ranks,
        first_view=wanted.ranks,
        fewest_ranks=wanted.least_to_serve,
        enough_ranks=wanted.fewest_ranks,
        relaunch_limit=options.relaunch_limit() if wanted.relaunch else 0,
        relaunch_backoff=0.1,
        longest_backoff=5.0,
        stable_after=10.0,
        start_deadline=_LOADED_WITHIN,
        settle_deadline=wanted.repair_timeout_s,
        stall_deadline=wanted.stall_timeout_s,
        stopped_deadline=_STOPPED_WITHIN if wanted.stall_timeout_s else 0.0,
        hung_deadline=wanted.hang_timeout_s if wanted.stall_timeout_s else 0.0,
    )


class LiveRanks:
    """Which ranks the controller may send to, from the effects of the supervisor.

    The supervisor's thread writes and the event loop reads: ``live`` is replaced whole, never changed.
    """

    def __init__(self, own: Collection[int]) -> None:
        """``own``: the ranks of this host. A server sends to no others."""
        self._own = frozenset(own)
        self.live: dict[int, int] = {}
        """The incarnation of every such rank that is in and not gone."""
        self.ended: deque[int] = deque()
        """Ranks with a life that ended, which the event loop has not seen yet."""
        self._gone: dict[int, int] = {}
        """The last incarnation of each rank whose end was seen."""

    def has_ended(self, rank: int, life: int) -> bool:
        return life <= self._gone.get(rank, NEVER)

    def follow(self, effect: Effect) -> None:
        match effect:
            case Notify(view=view):
                lives = {rank: view.incarnations[rank] for rank in view.active if rank in self._own}
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
        self.lives = LiveRanks((*wanted.own_ranks, *wanted.standby_ranks))
        self._judged: HostState | None = None
        self._backup: KeptProcess | None = None
        self._background = BackgroundSupervisor(self._make)
        self._background.start()
        self._backup = expert_backup.start(directory, wanted.backup)
        kept = self._backup, device_watcher.start_watching(directory, wanted.hardware)
        self._kept = [process for process in kept if process is not None]

    def _make(self) -> Supervisor:
        wanted = self._wanted
        supervisor = Supervisor(
            _launcher(),
            wanted.own_ranks,
            policy(wanted),
            standby=wanted.standby_ranks,
            host=wanted.host_name,
            launch=LaunchSettings(
                marks=tuple(f"{name}={os.environ[name]}" for name in [launcher.FORKED] if name in os.environ)
            ),
            directory=DirectorySettings(self.directory, remove=True),
            store=StoreSettings(self._open_store()),
            links=self._links(),
        )
        supervisor.watch_effects(self.lives.follow)
        supervisor.watch_effects(InstanceMetrics())
        log = ChangeLog(as_json=wanted.json_log, also=ChangeSpans() if wanted.traces else None)
        supervisor.watch_effects(log)
        supervisor.watch_reports(log.hear)
        supervisor.show("change", log.status)
        supervisor.show("backup", self._backup_status)
        return supervisor

    def _backup_status(self) -> dict[str, Any] | None:
        """None without ``--eep-backup``."""
        if self._wanted.backup == "off":
            return None
        process = {"pid": None, "starts": 0} if self._backup is None else self._backup.status()
        return {"from": self._wanted.backup, **process}

    def _open_store(self) -> RecordStore | None:
        host, key = self._wanted.host, PrivateDirectory.create(self.directory).key()
        return server_store.open_store(self._wanted.store, key, None if host is None else host.instance)

    def _links(self) -> LinkSettings | None:
        if (host := self._wanted.host) is None:
            return None
        return LinkSettings(host.address, PrivateDirectory(self.directory).key(), host_timeout_s=host.timeout_s)

    def pid(self, rank: int) -> int | None:
        return self._background.call(lambda supervisor: supervisor.pids.get(rank))

    def wait_until_loaded(self, rank: int) -> Any:
        """The first message of a scheduler. A standby rank has none yet, and one of another host has none here; they would
        say what the first rank of this host says.

        Raises when the rank cannot be started: a server that never served should end.
        """
        rank = rank if rank in self._wanted.own_ranks else self._wanted.own_ranks[0]
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
        fewest = max(self._wanted.least_to_serve, 1) if self._wanted.host is None else 1
        return resignation.why_to_resign(state.ranks, state.policy, fewest)

    def stop(self) -> None:
        for process in self._kept:
            process.stop()
        self._background.stop()


def _launcher() -> Launcher:
    """Ranks and spares are forked, unless a process had to open a GPU before it could be forked."""
    forks = None
    if controller_process.fork_server is not None:
        forks = ForkLauncher(rank_process.ENTRY, preload=PRELOAD, first=controller_process.fork_server)
    if spares := options.required().spares:
        warm, is_whole = "" if cpu.is_asked_for() else gpu_preload.ENTRY, options.required().has_whole_spares
        return SpareLauncher(
            rank_process.ENTRY,
            refill=Refill(spares, free_cores=_free_cores()),
            source=StartedSpares(IMPORTS) if forks is None else ForkedSpares(forks),
            warm=whole_spare.ENTRY if is_whole else warm,
            binds=is_whole,
        )
    return forks or SubprocessLauncher(command_of(cast(FunctionType, rank_process.main)))


def _free_cores() -> int:
    """Those that the ranks leave. On a CPU they leave none, and on a GPU each has one for its loop and one for the rest."""
    return 0 if cpu.is_asked_for() else len(os.sched_getaffinity(0)) - 2 * options.required().max_ranks
