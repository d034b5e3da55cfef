"""What the first rank of a view does for the balance: it adds up what all have counted, and proposes a dose of moves."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from eep.experts.balancing.asked_load import AskedLoad, balancedness, is_worth
from eep.experts.balancing.balance_record import BalanceRecord, publish_balance
from eep.experts.balancing.placement_log import PlacementLog
from eep.experts.placement.doses import DoseLimits, plan_dose
from eep.experts.placement.packing import FloatArray, IntArray
from eep.experts.placement.slot_plan import Placement, count_moves
from eep.experts.registry.directory_registry import Registry
from eep.experts.standing import Standing, route
from eep.view import View

logger = logging.getLogger(__name__)
_ASKED = "asked/"
_PAUSE_S = 0.001
_PATIENCE_S = 30.0
"""A proposal that not all ranks have staged by then is replaced."""


@dataclass(frozen=True, slots=True)
class BalancePolicy:
    """``every``: after how many steps the ranks look whether experts should move. ``least``: they move only where the
    balancedness is below it. ``layers``: in how many layers at once; None for all."""

    every: int = 1000
    least: float = 1.0
    layers: int | None = None


def asked_key(rank: int, incarnation: int) -> str:
    return f"{_ASKED}r{rank}.i{incarnation}"


class Leader:
    """Used by one thread. ``writes``: how many experts may move to a rank at once."""

    def __init__(self, log: PlacementLog, registry: Registry, policy: BalancePolicy, writes: int) -> None:
        self._log, self._registry, self._policy = log, registry, policy
        self._writes = writes
        self._asked: AskedLoad | None = None
        self._looked = 0
        self._followed = True
        """Whether the last dose was followed by another look: the load may be worth more than one dose."""
        self._proposed: tuple[Standing, int, float] | None = None
        """For what the last proposal was, its attempt, and when."""
        self._moved = 0

    def lead(self, standing: Standing, steps: int) -> None:
        """Propose a dose if it is time for one and it is worth it. ``steps``: how many this rank has run."""
        is_time = steps - self._looked >= self._policy.every
        switched = not self._followed and self._proposed is not None and standing is not self._proposed[0]
        if not (is_time or switched) or standing.placement.degraded:
            return
        placement = standing.placement
        if self._asked is None:
            self._asked = AskedLoad(placement.layers, placement.experts)
        if is_time:
            counted = self._read_counts(standing.view, self._asked.load.shape)
            if counted is None:
                return
            self._asked.look(counted)
            self._looked = steps
        self._followed = True
        even = balancedness(route(placement, standing.base), self._asked.load)
        publish_balance(
            self._registry,
            BalanceRecord(standing.view.epoch, float(even.mean()), float(even.min()), standing.base.doses, self._moved),
        )
        if self._asked.is_enough and even.mean() < self._policy.least:
            self._propose(standing, self._asked.load)

    def _propose(self, standing: Standing, load: FloatArray) -> None:
        attempt = 0
        if self._proposed is not None and self._proposed[0] is standing:
            if time.monotonic() < self._proposed[2] + _PATIENCE_S:
                return
            attempt = self._proposed[1] + 1
        view, placement = standing.view, standing.placement
        limits = DoseLimits(self._writes, self._policy.layers, least_copies=standing.base.least_copies)
        dose = plan_dose(load, placement, view.active, standing.base.topology, limits, _let_steps_run)
        base = with_active(standing.base.placement, dose, view.active)
        record = standing.base.renewed(base, load, standing.base.doses + 1)
        # Where copies may get no tokens, another choice of those that do may be worth it, without a move.
        now, then = route(placement, standing.base), route(dose, record)
        if not is_worth(now, then, load):
            return
        moved = count_moves(placement, dose)
        self._log.propose(standing.next_name, attempt, record)
        self._proposed, self._followed, self._moved = (standing, attempt, time.monotonic()), False, moved
        logger.info(
            "epoch %d: %d experts are to move; the busiest rank has %.3f times what an average one has, and then %.3f times",
            view.epoch,
            moved,
            float(now.imbalance(load).mean()),
            float(then.imbalance(load).mean()),
        )

    def _read_counts(self, view: View, shape: tuple[int, ...]) -> dict[str, FloatArray] | None:
        """By key, what each rank of the view has counted; None while one has said nothing."""
        found = self._registry.scan(_ASKED)
        counted = {}
        for rank in view.active:
            key = asked_key(rank, view.incarnations[rank])
            value = found.get(key, b"")
            if len(value) != 8 * int(np.prod(shape)):
                return None
            counted[key] = np.frombuffer(value, dtype="<i8").reshape(shape).astype(np.float64)
        return counted


def _let_steps_run() -> None:
    """A plan takes a while, and Python runs one thread at a time: the thread of the steps gets its turn."""
    time.sleep(_PAUSE_S)


def with_active(base: Placement, dose: Placement, active: tuple[int, ...]) -> Placement:
    """``base`` with what ``dose`` has on the active ranks. The others keep what they had, and find it when they are back."""
    table: IntArray = base.physical_to_logical.copy()
    size = base.slots_per_rank
    for rank in active:
        columns = slice(rank * size, (rank + 1) * size)
        table[:, columns] = dose.physical_to_logical[:, columns]
    return Placement(table, base.experts, size)
