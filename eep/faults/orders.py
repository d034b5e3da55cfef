"""Orders for faults in a running server: files in the supervisor's private directory, one for each armed point.

Only a user who can write there may give orders, and the server obeys them only if its operator allowed it. An order is for
a rank: the first incarnation that passes the point carries it out, even one that is started later. The process that is about
to act removes the order and writes a line to the event log. So it acts once, and every reader of the log can see that it did.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from eep import faults
from eep.access import make_private
from eep.faults import FaultPlan
from eep.observe.event_log import EventLog

_ALLOWED = "faults-allowed"
_FOLDER = "faults"
_LARGEST = 4096
SUPERVISOR = "supervisor"
FIRED = "FAULT"
"""The phase of the event-log lines that say that a point has acted."""

logger = logging.getLogger(__name__)


def allow_in(directory: Path) -> None:
    """Allows ``eep fault`` for the ranks of this supervisor. Without this call no process obeys an order."""
    make_private(directory / _FOLDER)
    (directory / _ALLOWED).touch(mode=0o600)


def allowed_in(directory: Path) -> bool:
    return (directory / _ALLOWED).exists()


def addressee_of(rank: int | None) -> str:
    """The name of the process that an order is for: a rank, or the supervisor (None)."""
    return SUPERVISOR if rank is None else f"rank-{rank}"


def give(directory: Path, rank: int | None, point: str, plan: FaultPlan) -> None:
    """Orders a rank, or the supervisor (None), to arm ``point``. Raises ValueError if it cannot be armed there."""
    faults.check_plan(point, plan)
    if faults.is_of_supervisor(point) is not (rank is None):
        passer = (
            "the supervisor passes {0}, not a rank: name no rank" if rank is not None else "ranks pass {0}: say which"
        )
        raise ValueError(passer.format(point))
    path = directory / _FOLDER / f"{addressee_of(rank)}@{point}"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(plan)))
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise ValueError(
            f"{point} is armed already in {addressee_of(rank)}; disarm it first with 'eep fault disarm'"
        ) from None
    finally:
        unfinished.unlink()


def pending(directory: Path) -> dict[tuple[str, str], Path]:
    """The files of the orders that no process has carried out, by addressee and point."""
    found = {}
    for name in os.listdir(directory / _FOLDER):
        who, _, point = name.partition("@")
        if point and not name.startswith("."):
            found[who, point] = directory / _FOLDER / name
    return found


def withdraw(directory: Path) -> int:
    """Takes all orders back and returns how many there were. An order that is being carried out cannot be taken back."""
    orders = pending(directory)
    for path in orders.values():
        path.unlink(missing_ok=True)
    return len(orders)


def obey_in(directory: Path, rank: int | None, incarnation: int = -1) -> None:
    """From now on this process, that rank or the supervisor, takes orders, if the operator allowed it."""
    if allowed_in(directory):
        faults.obey(FaultOrders(directory, rank, incarnation))


class FaultOrders:
    """The orders for this process. See :class:`eep.faults.OrderSource`."""

    def __init__(self, directory: Path, rank: int | None, incarnation: int) -> None:
        self._directory, self._rank, self._incarnation = directory, rank, incarnation

    def orders(self) -> Mapping[str, FaultPlan]:
        try:
            here = {
                point: path
                for (who, point), path in pending(self._directory).items()
                if who == addressee_of(self._rank)
            }
        except OSError:
            return {}  # the server removes the directory when it ends
        plans = {point: _read(point, path) for point, path in here.items()}
        return {point: plan for point, plan in plans.items() if plan is not None}

    def fired(self, point: str, action: str) -> bool:
        path = self._directory / _FOLDER / f"{addressee_of(self._rank)}@{point}"
        try:
            path.unlink()
        except OSError:
            return False  # the operator took it back at this moment
        rank = -1 if self._rank is None else self._rank
        cause = f"on purpose, {addressee_of(self._rank)}: {action} at {point}"
        with suppress(OSError):  # the fault is carried out even where there is no room for its line
            log = EventLog(self._directory / "events.jsonl", "localhost")
            log.write(FIRED, -1, cause, rank=rank, incarnation=self._incarnation, operation=point)
            log.close()
        return True


def _read(point: str, path: Path) -> FaultPlan | None:
    """The plan of an order; None for an order that cannot be obeyed, which is removed with a line in the log."""
    try:
        with path.open() as file:
            plan = FaultPlan(**json.loads(file.read(_LARGEST)))
        faults.check_plan(point, plan)
    except FileNotFoundError:
        return None  # taken back, or carried out, at this moment
    except (OSError, TypeError, ValueError) as error:
        logger.warning("eep: this process cannot obey the fault order %s and removes it: %s", path.name, error)
        path.unlink(missing_ok=True)
        return None
    return plan
