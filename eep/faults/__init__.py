"""Faults on purpose: the named points of a process (``injection``), and orders for them from outside (``orders``)."""

from __future__ import annotations

from eep.faults.injection import (
    LOSABLE,
    PLACES,
    FaultPlan,
    OrderSource,
    arm,
    armed,
    at,
    check_plan,
    disarm,
    is_of_supervisor,
    kernel_points,
    loses,
    obey,
    points,
    take_orders,
)

__all__ = [
    "LOSABLE",
    "PLACES",
    "FaultPlan",
    "OrderSource",
    "arm",
    "armed",
    "at",
    "check_plan",
    "disarm",
    "is_of_supervisor",
    "kernel_points",
    "loses",
    "obey",
    "points",
    "take_orders",
]
