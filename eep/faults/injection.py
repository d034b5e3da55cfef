"""Fault injection: make this process die, stop, sleep or spin at a named point, or lose the message it is about to send.

An armed point acts once, at the chosen passing. This is for tests and drills: a process in which no point is armed pays one
load of a word per point. Kernels have their own points, in the native library; all others are in ``PLACES``.

A process arms a point with :func:`arm`, or takes orders from outside (:mod:`eep.faults.orders`). It asks for orders whenever
it passes a point and at every step, and tells the source which points fired.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from eep.abi import native

ACTIONS = {"kill": 1, "stop": 2, "sleep": 3, "drop": 4, "spin": 5}
LOSABLE = ("dispatch.after_rows", "combine.after_rows", "request.received")
"""The points at which a message, about to be sent or just received, can be lost by ``drop``."""

PLACES: Mapping[str, str] = {
    "request.received": "a request has reached the rank; the front end was not told, and the rank has not begun it",
    "step.evidence": "a step or a collective cannot be trusted; the supervisor was not told",
    "step.revoked": "the rank has given up the step and told the supervisor",
    "view.agreed": "a view was committed; the rank has applied nothing of it",
    "view.mapped": "joiners are mapped; the peer table is unchanged",
    "view.patched": "the peer table shows the view",
    "repair.before": "before the rank brings in lost experts",
    "repair.mid": "a batch of experts was written to its slots; not verified yet",
    "repair.done": "all experts are there; routing is unchanged",
    "routing.published": "routing shows the new placement; the supervisor does not know that this rank has settled",
    "intents.before": "all ranks have settled; before they exchange their intents",
    "intents.after": "the ranks have exchanged their intents",
    "step.again": "before the rank runs the same batch again",
    "step.trusted": "the result of a step is good; the caller does not have it yet",
    "kv.journal": "the results of a good step are handed out; how far its requests are is not noted yet",
    "kv.backup.mid": "parts of contexts are copied to host memory; nothing says yet that they are there",
    "kv.restore.before": "before the rank copies the context of a request from a lost rank",
    "kv.restore.mid": "a part of the context is copied",
    "kv.restore.after": "the context is copied, and the request has it",
    "balance.staging": "a batch of experts that move was read beside the slots; not verified yet",
    "balance.staged": "all experts that move are beside the slots; the other ranks do not know it",
    "balance.agreed": "all ranks have staged the same moves, and the rank has heard it; nothing is written",
    "balance.written": "experts that move are in their slots; routing is unchanged",
    "balance.switched": "routing shows the new placement; the rank has not begun a step with it",
    "behind.reading": "a few experts were read into slots to which no token goes, behind the steps; not verified yet",
    "behind.arrived": "experts that came in behind the steps are verified; the other ranks do not know it",
    "behind.agreed": "all ranks have heard which experts have arrived; they are masked still",
    "behind.served": "routing shows the experts that have arrived; the rank has not begun a step with them",
    "room.made": "the rank has memory for more slots than usual; nothing is in them",
    "room.returned": "the rank has given back the memory of slots that it no longer uses; steps go on with the new placement",
    "role.told": "the rank has heard that it serves experts only, or requests again; it has changed nothing",
    "role.changed": "the rank that serves experts only has given up its KV cache, or has it again for requests",
    "spare.told": "a spare knows which life of its rank it is; it has taken over nothing",
    "spare.begun": "a spare has claimed its rank and the weights; it has not joined, and has no caches yet",
    "join.loaded": "a new incarnation has loaded everything; the supervisor does not know it",
    "join.ready": "a new incarnation has said that it is ready",
    "join.mapped": "a new incarnation has entered its first view; it has not checked its experts",
    "join.first_step": "before the first step of a new incarnation",
    "supervisor.evidence": "the supervisor has seen a loss; it has told no rank",
    "supervisor.before_commit": "the epoch is revoked; before the supervisor proposes the view without the lost ranks",
    "supervisor.before_notify": "a record was committed; before the supervisor tells the ranks",
    "supervisor.before_launch": "before the supervisor starts a rank",
    "supervisor.before_admit": "before the supervisor proposes a view with a joiner",
}
"""The points outside of kernels, in the order in which a loss and a rejoin pass them."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What happens at a point: at its ``skip + 1``-th passing, for ``sleep_ms`` (of a spin, too) or to ``count`` messages."""

    action: str
    skip: int = 0
    sleep_ms: float = 0
    count: int = 1


class OrderSource(Protocol):
    """Gives this process orders from outside."""

    def orders(self) -> Mapping[str, FaultPlan]:
        """What this process must arm now, by point."""

    def fired(self, point: str, action: str) -> bool:
        """A point is about to act. Returns False if it must not act after all."""


def kernel_points() -> tuple[str, ...]:
    """The points inside kernels, in the order in which a step passes them."""
    library = native.load()
    return tuple(library.eep_fault_name(point).decode() for point in range(library.eep_fault_count()))


def points() -> tuple[str, ...]:
    """The names of all points."""
    return (*kernel_points(), *PLACES)


def is_of_supervisor(point: str) -> bool:
    """Whether the supervisor, not a rank, passes that point."""
    return point.startswith("supervisor.")


def check_plan(point: str, plan: FaultPlan) -> None:
    """Raises ValueError, with what is wrong, if ``plan`` cannot be armed at ``point``."""
    if point not in points():
        raise ValueError(f"there is no fault point {point!r}; choose one of {', '.join(points())}")
    if plan.action not in ACTIONS:
        raise ValueError(f"there is no fault {plan.action!r}; choose one of {', '.join(ACTIONS)}")
    if plan.action == "drop" and point not in LOSABLE:
        raise ValueError(f"there is no message at {point} that could be lost; use {' or '.join(LOSABLE)}")
    if plan.skip < 0 or plan.sleep_ms < 0:
        raise ValueError(f"skip and sleep_ms cannot be negative, got {plan.skip} and {plan.sleep_ms}")
    if plan.count < 1:
        raise ValueError(f"count must be at least one message, got {plan.count}")


def arm(point: str, action: str, *, skip: int = 0, sleep_ms: float = 0, count: int = 1) -> None:
    """At the ``skip + 1``-th passing of ``point``, SIGKILL or SIGSTOP this process, sleep, spin, or lose ``count``
    messages."""
    plan = FaultPlan(action, skip, sleep_ms, count)
    check_plan(point, plan)
    with _armed.lock:
        _armed.add(point, plan)


def disarm() -> None:
    """Disarms every point of this process."""
    with _armed.lock:
        _armed.losing.clear()
        for point in tuple(_armed.plans):
            _armed.remove(point)


def armed() -> tuple[str, ...]:
    """The armed points that have not acted yet."""
    with _armed.lock:
        return tuple(_armed.plans)


def at(point: str) -> None:
    """This process passes ``point``: acts if it is armed."""
    if _armed.live:
        _armed.passed(point)


def loses(point: str) -> bool:
    """This process passes ``point`` with a message: acts if it is armed, and says whether the message is lost."""
    return _armed.live and _armed.passed(point)


def take_orders() -> None:
    """Takes new orders, between two steps. This is for points inside kernels, which cannot ask for themselves."""
    if _armed.live:
        with _armed.lock:
            _armed.take_orders()


def obey(source: OrderSource | None) -> None:
    """From now on this process takes orders from ``source`` alone; None: from no source."""
    disarm()
    with _armed.lock:
        _armed.source = source
        _armed.refresh()


class _Armed:
    """What is armed in this process. A caller that changes it holds ``lock``."""

    def __init__(self) -> None:
        # A kernel reports what fired while no other code holds the lock: arming passes no points.
        self.lock = threading.Lock()
        self.plans: dict[str, FaultPlan] = {}
        self.source: OrderSource | None = None
        self.live = False
        self.losing: Counter[str] = Counter()
        """How many more messages are lost at a point that has acted."""

    def add(self, point: str, plan: FaultPlan) -> None:
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
        self.live = bool(self.plans) or self.source is not None or self.losing.total() > 0

    def take_orders(self) -> None:
        if self.source is None:
            return
        orders = self.source.orders()
        for point in [point for point in self.plans if point not in orders]:
            self.remove(point)
        for point, plan in orders.items():
            if point not in self.plans:
                self.add(point, plan)

    def passed(self, point: str) -> bool:
        """Whether a message that is there is lost."""
        with self.lock:
            self.take_orders()
            if self.losing[point] > 0:
                self.losing[point] -= 1
                self.refresh()
                return True
            plan = self.plans.get(point)
            if plan is None:
                return False
            if plan.skip:
                self.plans[point] = replace(plan, skip=plan.skip - 1)
                return False
            self.remove(point)
            wanted = self.source is None or self.source.fired(point, plan.action)
            is_lost = wanted and plan.action == "drop"
            if is_lost:
                self.losing[point] = plan.count - 1
                self.refresh()
        if wanted:
            _act(plan)
        return is_lost

    def kernel_fired(self, point: str) -> None:
        with self.lock:
            plan = self.plans.pop(point, None)
            self.refresh()
            if plan is not None and self.source is not None:
                self.source.fired(point, plan.action)


_armed = _Armed()


def _act(plan: FaultPlan) -> None:
    match plan.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(plan.sleep_ms / 1000)
        case "spin":
            end = time.monotonic() + plan.sleep_ms / 1000
            while time.monotonic() < end:
                pass


def _arm_kernel(point: str, plan: FaultPlan | None) -> None:
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
    """What a kernel calls before a point acts. The cache keeps it for as long as the process lives."""
    return ctypes.CFUNCTYPE(None, ctypes.c_uint32)(lambda number: _armed.kernel_fired(kernel_points()[number]))
