"""Orders for faults in a running server: files in the supervisor's private directory, one for each armed point.

Whoever can write there may give them, and nobody else; and they are obeyed only where the server was told so. An order is
for a rank, whichever life of it passes the point first: so it also reaches one that is started later. The process that is
about to act removes the order and writes a line to the event log: it acts once, and everybody can see that it did.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from eep import faults
from eep.access import make_private
from eep.faults import Plan
from eep.observe.event_log import EventLog

_ALLOWED = "faults-allowed"
_FOLDER = "faults"
_LARGEST = 4096
SUPERVISOR = "supervisor"
FIRED = "FAULT"
"""The phase of the lines in the event log that say that a point has acted."""

logger = logging.getLogger(__name__)


def allow_in(directory: Path) -> None:
    """Lets ``eep fault`` at the ranks of this supervisor. Off unless the server was told so."""
    make_private(directory / _FOLDER)
    (directory / _ALLOWED).touch(mode=0o600)


def allowed_in(directory: Path) -> bool:
    return (directory / _ALLOWED).exists()


def name_of(rank: int | None) -> str:
    """Whom an order is for: a rank, or the supervisor."""
    return SUPERVISOR if rank is None else f"rank-{rank}"


def give(directory: Path, rank: int | None, point: str, plan: Plan) -> None:
    """Arms ``point`` in a rank, or in the supervisor (None). ValueError if that cannot be."""
    faults.check(point, plan)
    if faults.is_of_supervisor(point) is not (rank is None):
        whose = "the supervisor: name no rank" if rank is not None else "a rank: say which"
        raise ValueError(f"{point} is passed by {whose}")
    path = directory / _FOLDER / f"{name_of(rank)}@{point}"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(plan)))
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise ValueError(f"{point} is armed already in {name_of(rank)}; 'eep fault disarm' takes that back") from None
    finally:
        unfinished.unlink()


def pending(directory: Path) -> dict[tuple[str, str], Path]:
    """The orders that have not been carried out: whom for, and at which point."""
    found = {}
    for name in os.listdir(directory / _FOLDER):
        who, _, point = name.partition("@")
        if point and not name.startswith("."):
            found[who, point] = directory / _FOLDER / name
    return found


def withdraw(directory: Path) -> int:
    """Takes all orders back; how many there were. One that is being carried out cannot be taken back."""
    orders = pending(directory)
    for path in orders.values():
        path.unlink(missing_ok=True)
    return len(orders)


def obey_in(directory: Path, rank: int | None, incarnation: int = -1) -> None:
    """This process, that rank or the supervisor, takes orders from now on, if the server was told that it may."""
    if allowed_in(directory):
        faults.obey(Orders(directory, rank, incarnation))


class Orders:
    """The orders for this process. See :class:`eep.faults.Source`."""

    def __init__(self, directory: Path, rank: int | None, incarnation: int) -> None:
        self._directory, self._rank, self._incarnation = directory, rank, incarnation

    def orders(self) -> Mapping[str, Plan]:
        try:
            here = {
                point: path for (who, point), path in pending(self._directory).items() if who == name_of(self._rank)
            }
        except OSError:
            return {}  # the directory goes when the server ends
        plans = {point: _read(point, path) for point, path in here.items()}
        return {point: plan for point, plan in plans.items() if plan is not None}

    def fired(self, point: str, action: str) -> bool:
        path = self._directory / _FOLDER / f"{name_of(self._rank)}@{point}"
        try:
            path.unlink()
        except OSError:
            return False  # it was taken back in this very moment
        log = EventLog(self._directory / "events.jsonl", "localhost")
        rank = -1 if self._rank is None else self._rank
        cause = f"on purpose, {name_of(self._rank)}: {action} at {point}"
        log.write(FIRED, -1, cause, rank=rank, incarnation=self._incarnation, operation=point)
        log.close()
        return True


def _read(point: str, path: Path) -> Plan | None:
    """What an order says. One that says nothing that could be done is removed, with a line in the log."""
    try:
        with path.open() as file:
            plan = Plan(**json.loads(file.read(_LARGEST)))
        faults.check(point, plan)
    except FileNotFoundError:
        return None  # taken back, or carried out, in this very moment
    except (OSError, TypeError, ValueError) as error:
        logger.warning("eep: the order %s cannot be obeyed and is removed: %s", path.name, error)
        path.unlink(missing_ok=True)
        return None
    return plan
