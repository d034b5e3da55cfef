"""Fault injection: let this process die, stop or dawdle at a named point, or lose what it is about to send.

A point acts once, at the chosen passing. For tests and drills: a process in which nothing is armed pays one load of a word
per point. Kernels have their own points, in the native library; all others are in ``PLACES``.

What is armed is said by :func:`arm`, in this process, or by a source of orders from outside (:mod:`eep.faults.orders`), which
is asked whenever a point is passed and at every step, and told what fired.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from eep.abi import native

ACTIONS = {"kill": 1, "stop": 2, "sleep": 3, "drop": 4}
LOSABLE = ("dispatch.after_rows", "combine.after_rows")
"""The points at which a message is about to be sent, which ``drop`` can lose."""

PLACES: Mapping[str, str] = {
    "step.evidence": "a step or a collective cannot be trusted; nobody was told",
    "step.revoked": "the step is given up, and the supervisor was told",
    "view.agreed": "a view was committed; nothing of it is applied",
    "view.mapped": "newcomers are mapped; the peer table is as it was",
    "view.patched": "the peer table shows the view",
    "repair.before": "before lost experts are brought in",
    "repair.mid": "a batch of experts was written to its slots, and not verified yet",
    "repair.done": "all experts are there; routing is as it was",
    "routing.published": "routing shows the new placement; the supervisor was not told that this rank has settled",
    "intents.before": "all have settled; before the ranks tell each other what they will do",
    "intents.after": "the ranks have told each other what they will do",
    "step.again": "before the same batch is run again",
    "step.trusted": "the result of a step is good, and has not been handed out",
    "join.loaded": "a new life has loaded everything; the supervisor does not know it",
    "join.ready": "a new life has said that it is ready",
    "join.mapped": "a new life has entered its first view; it has not checked its experts",
    "join.first_step": "before the first step of a new life",
    "supervisor.evidence": "a loss was seen; nobody was told",
    "supervisor.before_commit": "the epoch is revoked; before the view without the lost is proposed",
    "supervisor.before_notify": "a record was committed; before the ranks are told",
    "supervisor.before_launch": "before a rank is started",
    "supervisor.before_admit": "before a view with a newcomer is proposed",
}
"""The points that are not inside of a kernel, in the order in which a loss and a return pass them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to happen at a point: at its ``skip + 1``-th passing, for ``sleep_ms`` or to ``count`` messages in a row."""

    action: str
    skip: int = 0
    sleep_ms: float = 0
    count: int = 1


class Source(Protocol):
    """Whoever gives orders from outside of this process."""

    def orders(self) -> Mapping[str, Plan]:
        """What is to be armed now, by point."""

    def fired(self, point: str, action: str) -> bool:
        """A point is about to act; False if it is not to after all."""


def kernel_points() -> tuple[str, ...]:
    """The points inside of kernels, in the order in which a step passes them."""
    library = native.load()
    return tuple(library.eep_fault_name(point).decode() for point in range(library.eep_fault_count()))


def points() -> tuple[str, ...]:
    """The names of all points."""
    return (*kernel_points(), *PLACES)


def is_of_supervisor(point: str) -> bool:
    """Whether a supervisor passes that point, and not a rank."""
    return point.startswith("supervisor.")


def check(point: str, plan: Plan) -> None:
    """Raises ValueError, with what is wrong, if that cannot be armed."""
    if point not in points():
        raise ValueError(f"there is no fault point {point!r}; there are {', '.join(points())}")
    if plan.action not in ACTIONS:
        raise ValueError(f"a fault is one of {', '.join(ACTIONS)}, got {plan.action!r}")
    if plan.action == "drop" and point not in LOSABLE:
        raise ValueError(f"no message is sent at {point} that could be lost: use {' or '.join(LOSABLE)}")
    if plan.skip < 0 or plan.sleep_ms < 0:
        raise ValueError("skip and sleep_ms cannot be negative")
    if plan.count < 1:
        raise ValueError(f"at least one message is lost, got {plan.count}")


def arm(point: str, action: str, *, skip: int = 0, sleep_ms: float = 0, count: int = 1) -> None:
    """At the ``skip + 1``-th passing of ``point``: SIGKILL or SIGSTOP this process, sleep, or lose ``count`` messages."""
    plan = Plan(action, skip, sleep_ms, count)
    check(point, plan)
    with _armed.lock:
        _armed.add(point, plan)


def disarm() -> None:
    """Takes every fault back."""
    with _armed.lock:
        for point in tuple(_armed.plans):
            _armed.remove(point)


def armed() -> tuple[str, ...]:
    """The points that have not acted yet."""
    with _armed.lock:
        return tuple(_armed.plans)


def at(point: str) -> None:
    """This process passes ``point``."""
    if _armed.live:
        _armed.passed(point)


def look() -> None:
    """Takes up new orders; for points inside of kernels, which cannot ask for themselves. Between two steps."""
    if _armed.live:
        with _armed.lock:
            _armed.take_orders()


def obey(source: Source | None) -> None:
    """From now on this process takes orders from there, and from nobody else; None: from nobody."""
    disarm()
    with _armed.lock:
        _armed.source = source
        _armed.refresh()


class _Armed:
    """What is armed in this process. Whoever changes it holds ``lock``."""

    def __init__(self) -> None:
        # A kernel tells what fired while nothing else holds the lock: arming does not pass points.
        self.lock = threading.Lock()
        self.plans: dict[str, Plan] = {}
        self.source: Source | None = None
        self.live = False

    def add(self, point: str, plan: Plan) -> None:
        self.plans[point] = plan
        if point not in PLACES:
            _arm_kernel(point, plan)
        self.refresh()

    def remove(self, point: str) -> None:
        del self.plans[point]
        if point not in PLACES:
            _arm_kernel(point, None)
        self.refresh()

    def refresh(self) -> None:
        self.live = bool(self.plans) or self.source is not None

    def take_orders(self) -> None:
        if self.source is None:
            return
        orders = self.source.orders()
        for point in [point for point in self.plans if point not in orders]:
            self.remove(point)
        for point, plan in orders.items():
            if point not in self.plans:
                self.add(point, plan)

    def passed(self, point: str) -> None:
        with self.lock:
            self.take_orders()
            plan = self.plans.get(point)
            if plan is None:
                return
            if plan.skip:
                self.plans[point] = replace(plan, skip=plan.skip - 1)
                return
            self.remove(point)
            wanted = self.source is None or self.source.fired(point, plan.action)
        if wanted:
            _act(plan)

    def kernel_fired(self, point: str) -> None:
        with self.lock:
            plan = self.plans.pop(point, None)
            self.refresh()
            if plan is not None and self.source is not None:
                self.source.fired(point, plan.action)


_armed = _Armed()


def _act(plan: Plan) -> None:
    match plan.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(plan.sleep_ms / 1000)


def _arm_kernel(point: str, plan: Plan | None) -> None:
    library = native.load()
    number = kernel_points().index(point)
    if plan is None:
        native.check(library, library.eep_fault_arm(number, 0, 0, 0))
        return
    library.eep_fault_notify(_notify())
    amount = plan.count if plan.action == "drop" else int(plan.sleep_ms * 1000)
    native.check(library, library.eep_fault_arm(number, ACTIONS[plan.action], plan.skip, amount))


@functools.cache
def _notify() -> ctypes._CFunctionType:
    """What a kernel calls before a point acts. Kept for as long as the process lives."""
    return ctypes.CFUNCTYPE(None, ctypes.c_uint32)(lambda number: _armed.kernel_fired(kernel_points()[number]))
