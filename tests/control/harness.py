"""Real supervisors with real rank processes, for tests."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.processes import command_of, entry_name
from eep.control.supervisor.settings import LaunchSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import InstanceRecord, Phase, Policy

PATIENCE = 120.0
"""How long anything may take before a test gives up; nothing is ever asserted about time."""

ROOT = Path(__file__).parents[2]
_SEARCHED = [path for path in [os.environ.get("PYTHONPATH")] if path]


def patient_policy(max_ranks: int, **changes: Any) -> Policy:
    """Deadlines that a loaded machine cannot miss by accident, and no rank given up because a test kills it often."""
    options: dict[str, Any] = {
        "relaunch_limit": 10**6,
        "longest_backoff": 0.5,
        "fence_deadline": PATIENCE,
        "settle_deadline": PATIENCE,
        "relaunch_backoff": 0.01,
    }
    return Policy(max_ranks=max_ranks, **{**options, **changes})


@asynccontextmanager
async def supervised(
    program: Any,
    ranks: int | tuple[int, ...] = 4,
    *,
    max_ranks: int | None = None,
    forked: bool = False,
    **options: Any,
) -> AsyncIterator[Supervisor]:
    """``forked``: from one process that has imported the program, which saves time if it imports torch."""
    numbers = tuple(range(ranks)) if isinstance(ranks, int) else ranks
    capacity = max_ranks or max(numbers) + 1
    policy = options.pop("policy", None) or patient_policy(capacity)
    store = StoreSettings(options.pop("store", None), options.pop("lease_ttl", 60.0))
    supervisor = Supervisor(
        ForkLauncher(entry_name(program), preload=[program.__module__]) if forked else command_of(program),
        numbers,
        policy,
        launch=LaunchSettings(environment={"PYTHONPATH": os.pathsep.join([str(ROOT), *_SEARCHED])}),
        store=store,
        **options,
    )
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()


async def until(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    await asyncio.wait_for(supervisor.wait_until(condition), PATIENCE)


def runs_with(supervisor: Supervisor, active: tuple[int, ...]) -> Callable[[], bool]:
    """Whether exactly these ranks are in and running."""

    def condition() -> bool:
        instance = supervisor.instance
        return instance is not None and instance.phase is Phase.RUN and instance.view.active == active

    return condition


def record(supervisor: Supervisor) -> InstanceRecord:
    assert supervisor.instance is not None
    return supervisor.instance


def kill(supervisor: Supervisor, rank: int) -> None:
    os.kill(supervisor.pids[rank], signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_all_threads_stand_still(pid: int) -> None:
    """After SIGSTOP: it reaches one thread, which then stops the others; until then any of them may still answer."""
    tasks, deadline = Path(f"/proc/{pid}/task"), time.monotonic() + PATIENCE
    while True:
        with suppress(FileNotFoundError, ProcessLookupError):  # one has ended since they were listed
            if all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()):
                return
        assert time.monotonic() < deadline, f"the threads of process {pid} do not stop"
        time.sleep(0.01)


async def until_gone(pids: list[int]) -> None:
    async with asyncio.timeout(PATIENCE):
        while any(is_running(pid) for pid in pids):
            await asyncio.sleep(0.01)


def children_of(mark: str) -> list[int]:
    """Every process that carries this supervisor's directory in its environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if f"EEP_CONTROL_DIR={mark}".encode() in environment.split(b"\0"):
                found.append(int(name))
    return found
