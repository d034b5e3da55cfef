"""Fault injection: let this process die, stop or dawdle at a named point of a kernel.

A point acts once, at the chosen passing. For tests and drills; a process in which nothing is armed pays one load of a
word per point.
"""

from __future__ import annotations

from eep import native

ACTIONS = {"kill": 1, "stop": 2, "sleep": 3}


def points() -> tuple[str, ...]:
    """The names of all points, in the order in which a step passes them."""
    library = native.load()
    return tuple(library.eep_fault_name(point).decode() for point in range(library.eep_fault_count()))


def arm(point: str, action: str, *, skip: int = 0, sleep_ms: float = 0) -> None:
    """At the ``skip + 1``-th passing of ``point``: SIGKILL or SIGSTOP this process, or sleep."""
    known = points()
    if point not in known:
        raise ValueError(f"there is no fault point {point!r}; there are {', '.join(known)}")
    if action not in ACTIONS:
        raise ValueError(f"a fault is one of {', '.join(ACTIONS)}, got {action!r}")
    if skip < 0 or sleep_ms < 0:
        raise ValueError("skip and sleep_ms cannot be negative")
    library = native.load()
    native.check(library, library.eep_fault_arm(known.index(point), ACTIONS[action], skip, int(sleep_ms * 1000)))


def disarm() -> None:
    """Takes every fault back."""
    library = native.load()
    for point in range(library.eep_fault_count()):
        native.check(library, library.eep_fault_arm(point, 0, 0, 0))
