"""Faults on purpose: the named points of this process (``injection``), and orders for them from outside (``orders``)."""

from __future__ import annotations

from eep.faults.injection import (
    LOSABLE,
    PLACES,
    Plan,
    Source,
    arm,
    armed,
    at,
    check,
    disarm,
    is_of_supervisor,
    kernel_points,
    look,
    obey,
    points,
)

__all__ = [
    "LOSABLE",
    "PLACES",
    "Plan",
    "Source",
    "arm",
    "armed",
    "at",
    "check",
    "disarm",
    "is_of_supervisor",
    "kernel_points",
    "look",
    "obey",
    "points",
]
