"""A real supervisor whose ranks take spares, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from eep.control.launch.fork_launcher import ForkLauncher
from eep.control.launch.processes import entry_name
from eep.control.launch.refill import Refill
from eep.control.launch.spare import ForkedSpares, StartedSpares
from eep.control.launch.spare_launcher import SpareLauncher
from eep.control.supervisor.settings import LaunchSettings, StoreSettings
from eep.control.supervisor.supervisor import Supervisor
from eep.observe.event_log import EventLine, read_events
from tests.control import ranks
from tests.control.harness import (
    ROOT,
    children_of,
    patient_policy,
    until,
)

BOTH = (0, 1)


@asynccontextmanager
async def spared(
    program: Callable[..., object] = ranks.steady,
    arguments: dict[str, object] | None = None,
    *,
    spares: int = 1,
    preload: tuple[str, ...] = ("tests.control.ranks",),
    warm: str = "",
    free_cores: int = 0,
    forked: bool = False,
    binds: bool = False,
    count: int = 2,
    **policy: object,
) -> AsyncIterator[tuple[Supervisor, SpareLauncher]]:
    refill = Refill(spares, free_cores=free_cores)
    source = ForkedSpares(ForkLauncher("", preload=preload)) if forked else StartedSpares(preload)
    launcher = SpareLauncher(entry_name(program), arguments, refill=refill, source=source, warm=warm, binds=binds)
    supervisor = Supervisor(
        launcher,
        range(count),
        patient_policy(count, **policy),
        launch=LaunchSettings(environment={"PYTHONPATH": str(ROOT)}),
        store=StoreSettings(lease_ttl=60.0),
    )
    await supervisor.start()
    try:
        yield supervisor, launcher
    finally:
        await supervisor.stop()
    assert not children_of(str(supervisor.directory.path)), "something was left behind"
    assert not supervisor.directory.path.exists()


def ready(launcher: SpareLauncher) -> list[int]:
    pids = launcher.status()["pids"]
    assert isinstance(pids, list)
    return pids


def lines(supervisor: Supervisor, phase: str) -> list[EventLine]:
    return [line for line in read_events(supervisor.directory.events) if line.phase == phase]


async def a_spare(supervisor: Supervisor, launcher: SpareLauncher, not_one_of: tuple[int, ...] = ()) -> int:
    """The process id of a spare that is ready."""
    await until(supervisor, lambda: any(pid not in not_one_of for pid in ready(launcher)))
    return next(pid for pid in ready(launcher) if pid not in not_one_of)
