"""When the ranks of a server begin their steps, for a bench that compares steps. The switch of the bench has it noted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common.moment_log import MomentLog, read_moments_by_process

_STEPS = "steps"


def note_steps(folder: Path) -> None:
    """In every process of the server, once. Steps begin where ranks tell each other what is in their batches."""
    from eep.recovery.session import Session

    collect = Session.collect
    log: MomentLog | None = None  # made by the process that steps: it may have been forked from this one

    def noting(self: Any, gather: Callable[[], Any]) -> Any:
        nonlocal log
        if log is None:
            log = MomentLog(folder, _STEPS)
        log.note()
        return collect(self, gather)

    Session.collect = noting  # type: ignore[method-assign]


def read_steps(folder: Path) -> list[list[float]]:
    """When the latest steps of each rank began (``time.monotonic``)."""
    return list(read_steps_by_process(folder).values())


def read_steps_by_process(folder: Path) -> dict[int, list[float]]:
    """The same, by the numbers of the processes."""
    return {pid: [moment for moment, _ in noted] for pid, noted in read_moments_by_process(folder, _STEPS).items()}
