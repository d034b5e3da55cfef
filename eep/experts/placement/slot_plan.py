"""Which expert lives in which slot, decided once and identically everywhere.

``plan_placement`` is a pure function of its arguments: every rank that calls it with the same values gets the same
placement, and ``Placement.digest`` lets ranks make sure of that before they act. It promises that

* every logical expert has a slot on an active rank whenever there are enough slots, and the stated policy
  applies when there are not;
* copies of one expert are on different ranks, and on different hosts where a slot allows;
* what can stay stays: the slots rewritten are exactly ``fewest_moves``, or at most ``extra_moves`` more when
  asked;
* where loads are equal, ranks that are alike take turns from layer to layer, so that all of them share what is
  brought in after a loss.

Ranks are numbered by capacity: the slots of rank ``r`` are ``r * slots_per_rank`` and on, whether or not it
is active.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from eep.experts.placement.packing import (
    EMPTY,
    BoolArray,
    Cluster,
    FloatArray,
    IntArray,
    count_copies,
    drop_duplicates,
    rank_loads,
    take_turns,
    turn_order,
)
from eep.experts.placement.strategies import choose_left_out, fewest_moves, place_from_scratch, retain, spend_moves

WhenShort = Literal["refuse", "mask"]


class CoverageError(RuntimeError):
    """There are fewer slots than experts. ``missing[layer, expert]`` says which experts would be left out."""

    def __init__(self, message: str, missing: BoolArray) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, eq=False)
class Placement:
    """``physical_to_logical[layer, slot]``: the expert in each slot or ``EMPTY``; the rest follows."""

    physical_to_logical: IntArray
    experts: int
    slots_per_rank: int

    def __post_init__(self) -> None:
        table = self.physical_to_logical
        if table.ndim != 2 or self.slots_per_rank < 1 or table.shape[1] % self.slots_per_rank:
            raise ValueError(
                f"a placement is [layers, ranks * slots_per_rank]; shape {table.shape} does not fit "
                f"{self.slots_per_rank} slots per rank"
            )
        if table.size and not EMPTY <= int(table.min()) <= int(table.max()) < self.experts:
            raise ValueError(f"a slot holds an expert between 0 and {self.experts - 1}, or {EMPTY} for none")
        table.setflags(write=False)

    @property
    def layers(self) -> int:
        return int(self.physical_to_logical.shape[0])

    @property
    def max_ranks(self) -> int:
        return int(self.physical_to_logical.shape[1]) // self.slots_per_rank

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(layers, experts, slots per rank, ranks)"""
        return self.layers, self.experts, self.slots_per_rank, self.max_ranks

    @cached_property
    def replica_counts(self) -> IntArray:
        """``[layers, experts]``: the copies of each expert."""
        return count_copies(self.physical_to_logical, self.experts)

    @cached_property
    def logical_to_physical(self) -> IntArray:
        """``[layers, experts, most copies]``: the slots of each expert in ascending order, then ``EMPTY``."""
        row, slot = np.nonzero(self.physical_to_logical != EMPTY)
        expert = self.physical_to_logical[row, slot]
        order = np.lexsort((slot, expert, row))
        row, slot, expert = row[order], slot[order], expert[order]
        starts = np.cumsum(self.replica_counts.ravel()) - self.replica_counts.ravel()
        nth = np.arange(len(row)) - starts[row * self.experts + expert]
        most = int(self.replica_counts.max(initial=1))
        table = np.full((self.layers, self.experts, most), EMPTY, dtype=np.int64)
        table[row, expert, nth] = slot
        return table

    @cached_property
    def masked(self) -> BoolArray:
        """``[layers, experts]``: the experts that no slot holds, which the gate must never pick."""
        return np.equal(self.replica_counts, 0)

    @cached_property
    def degraded(self) -> bool:
        """Whether some expert is masked."""
        return bool(self.masked.any())

    @cached_property
    def digest(self) -> str:
        """Equal for equal placements, on every machine."""
        shape = f"{self.physical_to_logical.shape}:{self.experts}:{self.slots_per_rank}:".encode()
        table = np.ascontiguousarray(self.physical_to_logical, dtype="<i8")
        return hashlib.blake2b(shape + table.tobytes(), digest_size=16).hexdigest()

    def on(self, active: Iterable[int]) -> Placement:
        """What is left of this placement on the ``active`` ranks."""
        keep = np.zeros(self.max_ranks, dtype=bool)
        keep[list(active)] = True
        table = np.where(np.repeat(keep, self.slots_per_rank), self.physical_to_logical, EMPTY)
        return Placement(table, self.experts, self.slots_per_rank)

    def imbalance(self, load: npt.ArrayLike) -> FloatArray:
        """``[layers]``: the load of the busiest rank over the mean."""
        used = (self.physical_to_logical != EMPTY).any(axis=0).reshape(self.max_ranks, -1).any(axis=1)
        demand = np.asarray(load, dtype=np.float64)
        served = rank_loads(self.physical_to_logical, demand, self.replica_counts, self.slots_per_rank)
        busy = served[:, used]
        fair = busy.sum(axis=1) / used.sum()
        return np.where(fair > 0, busy.max(axis=1) / np.where(fair > 0, fair, 1.0), 1.0)


def plan_placement(
    load: npt.ArrayLike,
    current: Placement | None,
    active: Iterable[int],
    slots_per_rank: int,
    topology: Sequence[int],
    *,
    when_short: WhenShort = "refuse",
    extra_moves: float = 0.0,
    max_copies: int | None = None,
    least_copies: int = 1,
) -> Placement:
    """Place the experts of ``load[layers, experts]`` on the ``active`` ranks.

    ``topology[rank]`` is the host of each rank and is as long as the capacity of the instance. ``current`` is the
    placement now (``None``: every slot is empty). ``extra_moves`` is how many more slots than the fewest may be rewritten for
    the sake of balance, as a share of the fewest; ``math.inf`` balances from scratch and then keeps what happens to
    fit. ``least_copies``: how many each expert gets, where slots allow, before any gets more; with 2, any one rank may go.
    """
    if when_short not in ("refuse", "mask"):
        raise ValueError(f"when_short is 'refuse' or 'mask', got {when_short!r}")
    if not extra_moves >= 0:
        raise ValueError(f"moves cannot be negative, got extra_moves={extra_moves}")
    demand, ranks, cluster = _checked(load, current, active, slots_per_rank, topology, max_copies)
    cluster = replace(cluster, least_copies=least_copies)
    layers, experts = demand.shape
    columns = (ranks[:, None] * slots_per_rank + np.arange(slots_per_rank)).ravel()
    before = np.full((layers, len(columns)), EMPTY, dtype=np.int64)
    if current is not None:
        before = drop_duplicates(current.physical_to_logical[:, columns], slots_per_rank)
    turns = turn_order(cluster, layers)
    before = take_turns(before, turns, slots_per_rank)

    missing = choose_left_out(before, demand)
    if missing.any() and when_short == "refuse":
        raise CoverageError(_shortage(missing, ranks, cluster), missing)

    if extra_moves == math.inf:
        after = place_from_scratch(before, demand, missing, cluster)
    else:
        # Layers that lost nothing and have no slot to fill stay as they are.
        fewest = fewest_moves(before, experts)
        rows = np.flatnonzero(fewest)
        after = before.copy()
        if len(rows):
            after[rows] = retain(before[rows], demand[rows], missing[rows], cluster)
        spend_moves(int(extra_moves * fewest.sum()), after, demand, cluster)
    table = np.full((layers, len(topology) * slots_per_rank), EMPTY, dtype=np.int64)
    table[:, columns] = take_turns(after, np.argsort(turns, axis=1), slots_per_rank)
    return Placement(table, experts, slots_per_rank)


def count_moves(before: Placement | None, after: Placement) -> int:
    """The slots that must be rewritten to get from ``before`` to ``after``."""
    written = after.physical_to_logical != EMPTY
    if before is not None:
        written &= before.physical_to_logical != after.physical_to_logical
    return int(written.sum())


def _checked(
    load: npt.ArrayLike,
    current: Placement | None,
    active: Iterable[int],
    slots_per_rank: int,
    topology: Sequence[int],
    max_copies: int | None,
) -> tuple[FloatArray, IntArray, Cluster]:
    """The arguments of ``plan_placement`` as arrays, or an error that says which of them is wrong."""
    demand = np.array(load, dtype=np.float64)
    if demand.ndim != 2 or not demand.size:
        raise ValueError(f"load must be [layers, experts], got shape {demand.shape}")
    if not np.isfinite(demand).all() or demand.min() < 0:
        raise ValueError("load must be finite and not negative: it counts tokens")
    if slots_per_rank < 1:
        raise ValueError(f"a rank needs at least one slot, got slots_per_rank={slots_per_rank}")
    ranks = np.array(sorted(set(active)), dtype=np.int64)
    if not len(ranks):
        raise ValueError("no rank is active: there is nowhere to place experts")
    if ranks[0] < 0 or ranks[-1] >= len(topology):
        raise ValueError(f"active ranks {ranks.tolist()} do not fit a topology of {len(topology)} ranks")
    if current is not None:
        expected = (demand.shape[0], demand.shape[1], slots_per_rank, len(topology))
        if current.shape != expected:
            raise ValueError(
                f"the current placement has (layers, experts, slots per rank, ranks) {current.shape}, "
                f"the arguments {expected}"
            )
    if max_copies is not None and max_copies < 1:
        raise ValueError(f"an expert needs at least one copy, got max_copies={max_copies}")
    # An expert that was never asked for still counts a little, so that idle experts are spread and not piled up.
    demand += max(float(demand.max()), 1.0) * 1e-9
    cluster = Cluster(
        slots_per_rank,
        np.unique(np.asarray(topology)[ranks], return_inverse=True)[1].astype(np.int64),
        min(len(ranks), max_copies or len(ranks)),
    )
    return demand, ranks, cluster


def _shortage(missing: BoolArray, ranks: IntArray, cluster: Cluster) -> str:
    layer = int(missing.sum(axis=1).argmax())
    experts = missing.shape[1]
    slots = len(ranks) * cluster.slots_per_rank
    some = np.flatnonzero(missing[layer])
    names = ", ".join(map(str, some[:8])) + (f" and {len(some) - 8} more" if len(some) > 8 else "")
    return (
        f"{len(ranks)} active ranks with {cluster.slots_per_rank} slots each hold {slots} experts, but a "
        f"layer has {experts}: layer {layer} would lose {names}; layers that are short: "
        f"{int(missing.any(axis=1).sum())}. "
        f"Bring back {-(-experts // cluster.slots_per_rank) - len(ranks)} rank(s), give each rank "
        f"{-(-experts // len(ranks))} slots, or pass when_short='mask' to serve without these experts"
    )
