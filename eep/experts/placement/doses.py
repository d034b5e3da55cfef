"""A dose: the few moves that even out the ranks most, for the load that is asked for now. Pure, like ``packing``.

A dose changes a placement in two ways. Two slots of different ranks exchange their experts, which writes both; or a further
copy of an expert takes the place of a copy that its own expert can do without, which writes one. Each change is the one that
gains most for each slot written, over all layers. A change that gains little is left out: loads vary from look to look, and
moves cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from eep.experts.placement.packing import EMPTY, BoolArray, FloatArray, IntArray, count_copies
from eep.experts.placement.slot_plan import Placement

_POWER = 16
"""The busiest rank counts most, and of two that are equally busy both count."""


@dataclass(frozen=True, slots=True)
class DoseLimits:
    """``writes_per_rank``: how many slots of a rank one dose may write. ``layers``: in how many layers it may do so.
    ``least_gain``: what each written slot must gain, as a share of what an average rank of the layer has to do.
    ``least_copies``: no dose leaves an expert fewer, or fewer hosts, if it had as many."""

    writes_per_rank: int
    layers: int | None = None
    least_gain: float = 0.00125
    least_copies: int = 1


@dataclass(frozen=True, slots=True)
class _Change:
    """``slots[i]`` gets ``experts[i]``."""

    gain: float
    slots: tuple[int, ...]
    experts: tuple[int, ...]


def plan_dose(
    load: FloatArray,
    current: Placement,
    active: Iterable[int],
    topology: Sequence[int],
    limits: DoseLimits,
    pause: Callable[[], object] | None = None,
) -> Placement:
    """``current`` with at most a dose of moves between the ``active`` ranks; ``current`` itself if none is worth it.

    No layer's busiest rank gets busier. No move puts two copies of an expert on one rank or takes away its last copy. No
    exchange leaves an expert fewer than two hosts if it had as many. What inactive ranks hold stays as it is. ``pause`` is
    called after each part of the work, for a caller that has other things to do.
    """
    ranks = np.array(sorted(set(active)), dtype=np.int64)
    size = current.slots_per_rank
    columns = (ranks[:, None] * size + np.arange(size)).ravel()
    host = np.unique(np.asarray(topology)[ranks], return_inverse=True)[1].astype(np.int64)
    layers = [
        _Layer(current.physical_to_logical[layer, columns], load[layer], size, host, limits.least_copies)
        for layer in range(current.layers)
    ]
    room = np.full(len(ranks), limits.writes_per_rank)

    def best_change(number: int) -> _Change | None:
        change = layers[number].best_change(room)
        if pause is not None:
            pause()
        return change if change is not None and change.gain >= limits.least_gain else None

    chosen: set[int] = set()
    queue: list[tuple[float, int]] = []
    for number in range(len(layers)):
        if (change := best_change(number)) is not None:
            queue.append((-change.gain, number))
    heapq.heapify(queue)
    while queue:
        promised, number = heapq.heappop(queue)
        if number not in chosen and limits.layers is not None and len(chosen) >= limits.layers:
            continue
        if (change := best_change(number)) is None:
            continue
        if change.gain < -promised * (1 - 1e-9):  # ranks have less room than when it was queued: others may gain more
            heapq.heappush(queue, (-change.gain, number))
            continue
        layers[number].make(change)
        chosen.add(number)
        for slot in change.slots:
            room[slot // size] -= 1
        if (following := best_change(number)) is not None:
            heapq.heappush(queue, (-following.gain, number))
    if not chosen:
        return current
    table = current.physical_to_logical.copy()
    table[:, columns] = np.stack([layer.slots for layer in layers])
    return Placement(table, current.experts, size)


class _Layer:
    """One layer on the active ranks. ``slots[slot]`` is the expert there; a slot is written at most once."""

    def __init__(self, slots: IntArray, load: FloatArray, size: int, host: IntArray, least: int) -> None:
        self.slots = slots.copy()
        self._least = least
        self._size, self._host = size, host
        self._rank = np.arange(len(slots)) // size
        # Idle experts count a little, so that they are spread as well.
        self._load = load + max(float(load.max(initial=0.0)), 1.0) * 1e-9
        self._count = count_copies(slots[None], len(load))[0]
        self._free = slots != EMPTY
        self._mean = float(self._load[self._count > 0].sum()) / len(host)
        self._find_holders()

    def _find_holders(self) -> None:
        there = self.slots != EMPTY
        self._holds = np.zeros((len(self._load), len(self._host)), dtype=bool)
        self._holds[self.slots[there], self._rank[there]] = True
        self._on_host = np.stack(
            [self._holds[:, self._host == host].sum(axis=1) for host in range(int(self._host.max()) + 1)], axis=1
        )
        share = self._load / np.maximum(self._count, 1)
        self._served = np.where(there, share[np.maximum(self.slots, 0)], 0.0)
        self._busy: FloatArray = np.zeros(len(self._host))
        np.add.at(self._busy, self._rank, self._served)

    def make(self, change: _Change) -> None:
        for slot, expert in zip(change.slots, change.experts, strict=True):
            self._count[self.slots[slot]] -= 1
            self._count[expert] += 1
            self.slots[slot] = expert
            self._free[slot] = False
        self._find_holders()

    def best_change(self, room: IntArray) -> _Change | None:
        """The change that gains most for each slot that it writes. ``room[rank]``: how many more slots a rank may write."""
        if self._mean <= 0 or len(self._host) < 2:
            return None
        worst = int(self._busy.argmax())
        found = [self._best_exchange(worst, room), self._best_copy(worst, room)]
        return max((each for each in found if each is not None), key=lambda change: change.gain, default=None)

    def _best_exchange(self, worst: int, room: IntArray) -> _Change | None:
        if room[worst] < 1:
            return None
        mine = np.flatnonzero(self._free & (self._rank == worst))
        theirs = np.flatnonzero(self._free & (self._rank != worst) & (room[self._rank] > 0))
        if not len(mine) or not len(theirs):
            return None
        my_expert, expert, rank = self.slots[mine], self.slots[theirs], self._rank[theirs]
        shift = self._served[mine][:, None] - self._served[theirs][None, :]
        busy = self._busy[rank]
        my_busy, their_busy = self._busy[worst] - shift, busy[None, :] + shift
        after = self._strain(my_busy) + self._strain(their_busy)
        before = self._strain(self._busy)
        total = before.sum() - before[worst] - before[rank][None, :] + after
        allowed = ~self._holds[my_expert][:, rank] & ~self._holds[expert, worst][None, :]
        allowed &= their_busy <= self._busy[worst]
        here, there = self._host[worst], self._host[rank]
        allowed &= (
            self._may_move(my_expert[:, None], here, there[None, :]) & self._may_move(expert, there, here)[None, :]
        )
        total = np.where(allowed, total, np.inf)
        best = int(total.argmin())
        i, j = divmod(best, len(theirs))
        if not np.isfinite(total[i, j]):
            return None
        gain = (self._norm(before.sum()) - self._norm(total[i, j])) / 2
        return _Change(gain, (int(mine[i]), int(theirs[j])), (int(self.slots[theirs[j]]), int(self.slots[mine[i]])))

    def _best_copy(self, worst: int, room: IntArray) -> _Change | None:
        hot = np.unique(self.slots[(self._rank == worst) & (self.slots != EMPTY)])
        expert = np.maximum(self.slots, 0)
        places = np.flatnonzero(
            self._free & (self._rank != worst) & (room[self._rank] > 0) & (self._count[expert] > self._least)
        )
        if self._least > 1:
            places = places[self._may_go(expert[places], self._host[self._rank[places]])]
        if not len(hot) or not len(places):
            return None
        given_up, rank = self.slots[places], self._rank[places]
        copies, others = self._count[hot], self._count[given_up] - 1
        fresh, left = self._load[hot] / (copies + 1), self._load[given_up] / others
        less = self._holds[hot] * (fresh - self._load[hot] / copies)[:, None]
        more = self._holds[given_up] * (left - self._load[given_up] / (others + 1))[:, None]
        busy = self._busy[None, None, :] + less[:, None, :] + more[None, :, :]
        at = np.arange(len(places))
        busy[:, at, rank] += fresh[:, None] - left[None, :]
        total = self._strain(busy).sum(axis=2)
        allowed = ~self._holds[hot][:, rank] & (busy.max(axis=2) <= self._busy[worst])
        total = np.where(allowed, total, np.inf)
        i, j = divmod(int(total.argmin()), len(places))
        if not np.isfinite(total[i, j]):
            return None
        gain = self._norm(self._strain(self._busy).sum()) - self._norm(total[i, j])
        return _Change(gain, (int(places[j]),), (int(hot[i]),))

    def _strain(self, busy: FloatArray) -> FloatArray:
        strain = np.maximum(busy, 0.0) / self._mean
        for _ in range(_POWER.bit_length() - 1):
            strain = strain * strain
        return strain

    def _norm(self, total: float) -> float:
        return float(total ** (1 / _POWER))

    def _may_move(self, expert: IntArray, source: IntArray, target: IntArray) -> BoolArray:
        """Whether an expert that has two hosts or more still has two when it has gone from one host to another."""
        had = (self._on_host[expert] > 0).sum(axis=-1)
        after = had - (self._on_host[expert, source] == 1) + (self._on_host[expert, target] == 0)
        return np.asarray((had < 2) | (source == target) | (after >= 2))

    def _may_go(self, expert: IntArray, source: IntArray) -> BoolArray:
        """The same where it goes from a host to none."""
        had = (self._on_host[expert] > 0).sum(axis=-1)
        return np.asarray((had < 2) | (had - (self._on_host[expert, source] == 1) >= 2))
