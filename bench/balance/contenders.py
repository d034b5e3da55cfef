"""Balancers that follow a load: each is told the load of the last look, and serves that of the next with what it made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.repair.eplb_greedy import eplb_greedy
from eep.experts.balancing.asked_load import AskedLoad, is_worth
from eep.experts.balancing.leader import with_active
from eep.experts.placement.doses import DoseLimits, plan_dose
from eep.experts.placement.packing import FloatArray
from eep.experts.placement.slot_plan import Placement, count_moves, plan_placement

STAGED = 8
"""Experts that move to a rank at once, as the server has it."""
_MOST_DOSES = 12
"""Between two looks: more would not end before the next."""


@dataclass
class Follower:
    """``follow`` makes the next placement from a load, the last placement and the active ranks."""

    follow: Callable[[FloatArray, Placement, Sequence[int]], Placement]
    base: Placement
    """Over all ranks, those that are lost too."""
    placement: Placement
    moves: int = 0
    busiest: list[float] = field(default_factory=list)
    """Of each look: the busiest rank over the mean, averaged over layers."""
    seconds: list[float] = field(default_factory=list)

    def serve(self, load: FloatArray) -> None:
        self.busiest.append(float(self.placement.imbalance(load).mean()))

    def learn(self, load: FloatArray, active: Sequence[int]) -> None:
        began = time.perf_counter()
        after = self.follow(load, self.placement, active)
        self.seconds.append(time.perf_counter() - began)
        self.moves += count_moves(self.placement, after)
        self.placement, self.base = after, with_active(self.base, after, tuple(active))

    def change_ranks(self, load: FloatArray, active: Sequence[int], topology: Sequence[int]) -> None:
        """As a server does: with the fewest moves, and a rank that is back has what it had."""
        self.placement = plan_placement(load, self.base, active, self.base.slots_per_rank, topology)


def stay(load: FloatArray, placement: Placement, active: Sequence[int]) -> Placement:
    return placement


def greedy(load: FloatArray, placement: Placement, active: Sequence[int]) -> Placement:
    size = placement.slots_per_rank
    columns = np.concatenate([np.arange(rank * size, (rank + 1) * size) for rank in active])
    table = np.full_like(placement.physical_to_logical, -1)
    table[:, columns] = eplb_greedy(load, len(active), size)
    return Placement(table, placement.experts, size)


class DoseFollower:
    """What the first rank of a server does until its next look: one dose after the other, while they are worth it."""

    def __init__(self, start: Placement, topology: Sequence[int]) -> None:
        self._asked = AskedLoad(start.layers, start.experts)
        self._counted: FloatArray = np.zeros((start.layers, start.experts))
        self._topology = topology
        self._asked.look({"all": self._counted})

    def follow(self, load: FloatArray, placement: Placement, active: Sequence[int]) -> Placement:
        self._counted = self._counted + load
        self._asked.look({"all": self._counted})
        if not self._asked.is_enough:
            return placement
        for _ in range(_MOST_DOSES):
            after = plan_dose(self._asked.load, placement, active, self._topology, DoseLimits(STAGED))
            if not is_worth(placement, after, self._asked.load):
                break
            placement = after
        return placement


def follow_trace(
    trace: Iterable[FloatArray], start: Placement, topology: Sequence[int], lost: int, between: range
) -> dict[str, Follower]:
    """Every balancer on the same loads. Rank ``lost`` is away ``between`` these looks."""
    every = list(range(start.max_ranks))
    followers = {
        "none": Follower(stay, start, start),
        "DeepSeek's greedy balancer": Follower(greedy, start, start),
        "doses": Follower(DoseFollower(start, topology).follow, start, start),
    }
    active = every
    for look, load in enumerate(trace):
        now = [rank for rank in every if rank != lost or look not in between]
        for follower in followers.values():
            if now != active:
                follower.change_ranks(load, now, topology)
            follower.serve(load)
            follower.learn(load, now)
        active = now
    return followers


def rows(trace: str, followers: dict[str, Follower], layers: int, between: range) -> list[dict[str, Any]]:
    """A line per balancer. The first looks, in which all start from the same placement, do not count."""
    made = []
    for name, follower in followers.items():
        served = follower.busiest[4:]
        yardstick = followers["DeepSeek's greedy balancer"]
        lost, their_lost = (
            float(np.mean(each.busiest[between.start : between.stop])) for each in (follower, yardstick)
        )
        made.append(
            {
                "trace": trace,
                "balancer": name,
                "busiest_rank_over_mean": float(np.mean(served)),
                "over_greedy": float(np.mean(served) / np.mean(yardstick.busiest[4:])),
                "with_a_rank_lost": lost,
                "then_over_greedy": lost / their_lost,
                "moves_per_layer_and_look": follower.moves / layers / len(follower.busiest),
                "moves_over_greedy": follower.moves / max(1, yardstick.moves),
                "milliseconds_to_plan": 1e3 * float(np.median(follower.seconds)),
            }
        )
    return made
