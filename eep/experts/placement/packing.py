"""The arithmetic of placing experts, on plain arrays and for all layers at once. No I/O, no randomness, no
clock.

Slots are columns: ``slot_expert[layer, slot]`` names the logical expert that the slot holds, or ``EMPTY``.
The columns are those of the active ranks only, ``slots_per_rank`` for each, so that ``slot //
slots_per_rank`` is the position of the rank among the active ones. A replica serves ``load / replicas`` of
its expert, as in DeepSeek's EPLB. Two greedy ideas come from there too: the hottest expert gets the next
replica, and the coolest rank gets the hottest replica. Here they also respect what is already in place, ranks,
hosts and unequal ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

EMPTY = -1

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The active ranks as the arithmetic sees them."""

    slots_per_rank: int
    host: IntArray
    """The host of each active rank, numbered from 0."""
    max_copies: int
    least_copies: int = 1
    """How many copies each expert has, where slots allow, before any has more."""

    @property
    def ranks(self) -> int:
        return len(self.host)

    @property
    def hosts(self) -> int:
        return int(self.host.max()) + 1


def turn_order(cluster: Cluster, layers: int) -> IntArray:
    """``[layers, ranks]``: the ranks in the order in which a layer looks at them.

    Where ranks are equally good, the first one gets the copy. If that were the same rank in every layer, it would hold
    the second copies of all layers, and after a loss bring in everything alone. So ranks of one host take turns.
    """
    order = np.tile(np.arange(cluster.ranks), (layers, 1))
    for host in range(cluster.hosts):
        alike = np.flatnonzero(cluster.host == host)
        order[:, alike] = alike[(np.arange(len(alike)) + np.arange(layers)[:, None]) % len(alike)]
    return order


def take_turns(slot_expert: IntArray, order: IntArray, slots_per_rank: int) -> IntArray:
    """The slots of each layer with its ranks in ``order[layer]``."""
    by_rank = slot_expert.reshape(len(slot_expert), -1, slots_per_rank)
    return np.take_along_axis(by_rank, order[:, :, None], axis=1).reshape(slot_expert.shape)


def count_copies(slot_expert: IntArray, experts: int) -> IntArray:
    """How many slots hold each expert: ``[layers, experts]``."""
    layers = len(slot_expert)
    held = slot_expert != EMPTY
    flat = (slot_expert + np.arange(layers)[:, None] * experts)[held]
    return np.bincount(flat, minlength=layers * experts).reshape(layers, experts)


def slot_loads(slot_expert: IntArray, load: FloatArray, count: IntArray) -> FloatArray:
    """The load that each slot serves when an expert's load is shared evenly by its copies."""
    share = load / np.maximum(count, 1)
    served = np.take_along_axis(share, np.maximum(slot_expert, 0), axis=1)
    served[slot_expert == EMPTY] = 0.0
    return served


def rank_loads(slot_expert: IntArray, load: FloatArray, count: IntArray, slots_per_rank: int) -> FloatArray:
    served = slot_loads(slot_expert, load, count)
    return np.asarray(served.reshape(len(served), -1, slots_per_rank).sum(axis=2))


def find_owned(slot_expert: IntArray, experts: int, slots_per_rank: int) -> BoolArray:
    """Which rank has which expert: ``[layers, ranks, experts]``."""
    layers, slots = slot_expert.shape
    ranks = slots // slots_per_rank
    row, slot = np.nonzero(slot_expert != EMPTY)
    owned = np.zeros((layers, ranks, experts), dtype=bool)
    owned[row, slot // slots_per_rank, slot_expert[row, slot]] = True
    return owned


def drop_duplicates(slot_expert: IntArray, slots_per_rank: int) -> IntArray:
    """Empty every slot whose expert sits in an earlier slot of the same rank: such a copy serves no token."""
    layers, slots = slot_expert.shape
    by_rank = slot_expert.reshape(layers, slots // slots_per_rank, slots_per_rank)
    order = np.argsort(by_rank, axis=2, kind="stable")
    ordered = np.take_along_axis(by_rank, order, axis=2)
    twin_in_order = np.zeros_like(ordered, dtype=bool)
    twin_in_order[:, :, 1:] = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != EMPTY)
    twin = np.zeros_like(twin_in_order)
    np.put_along_axis(twin, order, twin_in_order, axis=2)
    return np.where(twin, EMPTY, by_rank).reshape(layers, slots)


def add_copies(count: IntArray, load: FloatArray, wanted: IntArray, limit: IntArray, least: int = 1) -> IntArray:
    """Give ``wanted[layer]`` further copies, each to the expert whose copies are then the hottest; new
    counts.

    No expert goes above ``limit``. An expert at its limit is passed over, so fewer may be given than wanted. Experts with
    fewer copies than ``least`` come before all others.
    """
    count = count.copy()
    first = 1.0 + float(load.max(initial=0.0))

    def heat(load: FloatArray, count: IntArray, limit: IntArray) -> FloatArray:
        found = load / np.maximum(count, 1) + np.where((count > 0) & (count < least), first, 0.0)
        return np.where(count < limit, found, -1.0)

    share = heat(load, count, limit)
    for turn in range(int(wanted.max(initial=0))):
        rows = np.flatnonzero(wanted > turn)
        expert = share[rows].argmax(axis=1)
        open_ = share[rows, expert] >= 0
        rows, expert = rows[open_], expert[open_]
        if not len(rows):
            break
        count[rows, expert] += 1
        share[rows, expert] = heat(load[rows, expert], count[rows, expert], limit[rows, expert])
    return count


def place_copies(slot_expert: IntArray, load: FloatArray, count: IntArray, cluster: Cluster) -> None:
    """Put into empty slots, in place, the copies that ``count`` has and ``slot_expert`` has not.

    The hottest copy comes first, and each goes onto the rank that is then coolest. That rank has room and does not
    hold the expert; where one exists, it is on a host that does not hold the expert either. First copies always find
    room. A further copy that finds none is given up; the slot that stays empty gets the hottest
    expert that its rank does not hold.
    """
    layers, experts = load.shape
    owned = find_owned(slot_expert, experts, cluster.slots_per_rank)
    on_host = np.zeros((layers, cluster.hosts, experts), dtype=bool)
    for rank, host in enumerate(cluster.host):
        on_host[:, host] |= owned[:, rank]
    free = (slot_expert == EMPTY).reshape(layers, cluster.ranks, -1).sum(axis=2)
    busy = rank_loads(slot_expert, load, count, cluster.slots_per_rank)
    share = load / np.maximum(count, 1)
    fair = np.where(count > 0, load, 0.0).sum(axis=1) / cluster.ranks

    missing = count - owned.sum(axis=1)
    row, expert = np.nonzero(missing)
    row, expert = np.repeat(row, missing[row, expert]), np.repeat(expert, missing[row, expert])
    # By layer, hottest first; copies of one expert stay together, and the expert's number breaks ties. Copies beyond the
    # least come last: they must not take the room on another host that a second copy needs.
    begins = np.r_[True, (row[1:] != row[:-1]) | (expert[1:] != expert[:-1])] if len(row) else np.zeros(0, dtype=bool)
    nth = np.arange(len(row)) - np.maximum.accumulate(np.where(begins, np.arange(len(row)), 0))
    further = nth + owned.sum(axis=1)[row, expert] >= cluster.least_copies
    order = np.lexsort((expert, -share[row, expert], further & (cluster.least_copies > 1), row))
    row, expert = row[order], expert[order]
    first = np.searchsorted(row, np.arange(layers + 1))
    length = np.diff(first)
    for turn in range(int(length.max(initial=0))):
        rows = np.flatnonzero(length > turn)
        item = expert[first[rows] + turn]
        pressure = busy[rows] + share[rows, item][:, None]
        possible = (free[rows] > 0) & ~owned[rows, :, item]
        near = on_host[rows, :, item]
        elsewhere = possible & ~near[:, cluster.host]
        # The second host is worth an uneven rank, since it saves the expert when a host is lost. A third is
        # not.
        harmless = pressure <= np.maximum(busy[rows].max(axis=1), fair[rows])[:, None]
        elsewhere &= harmless | (near.sum(axis=1) == 1)[:, None]
        possible = np.where(elsewhere.any(axis=1)[:, None], elsewhere, possible)
        rank = np.where(possible, pressure, np.inf).argmin(axis=1)
        fits = possible[np.arange(len(rows)), rank]
        rows, item, rank = rows[fits], item[fits], rank[fits]
        write_into_empty(slot_expert, rows, rank, item, cluster.slots_per_rank)
        owned[rows, rank, item] = True
        on_host[rows, cluster.host[rank], item] = True
        free[rows, rank] -= 1
        busy[rows, rank] += share[rows, item]
    _fill(slot_expert, load, owned, free, cluster)


def _fill(slot_expert: IntArray, load: FloatArray, owned: BoolArray, free: IntArray, cluster: Cluster) -> None:
    """Leave no slot empty that could hold an expert its rank does not have."""
    count = owned.sum(axis=1)
    while True:
        rows, rank = np.nonzero(free > 0)
        rows, first = np.unique(rows, return_index=True)
        if not len(rows):
            return
        rank = rank[first]
        possible = ~owned[rows, rank] & (count[rows] < cluster.max_copies) & (count[rows] > 0)
        share = np.where(possible, load[rows] / np.maximum(count[rows], 1), -1.0)
        expert = share.argmax(axis=1)
        fits = share[np.arange(len(rows)), expert] >= 0
        free[rows[~fits], rank[~fits]] = 0
        rows, rank, expert = rows[fits], rank[fits], expert[fits]
        write_into_empty(slot_expert, rows, rank, expert, cluster.slots_per_rank)
        owned[rows, rank, expert] = True
        count[rows, expert] += 1
        free[rows, rank] -= 1


def write_into_empty(
    slot_expert: IntArray, rows: IntArray, rank: IntArray, expert: IntArray, slots_per_rank: int
) -> None:
    """Write each expert into the first empty slot of its rank."""
    columns = rank[:, None] * slots_per_rank + np.arange(slots_per_rank)
    column = (slot_expert[rows[:, None], columns] == EMPTY).argmax(axis=1)
    slot_expert[rows, rank * slots_per_rank + column] = expert


def pad_columns(mask: BoolArray) -> tuple[IntArray, BoolArray]:
    """The columns where ``mask`` is set, ascending and filled up to one width; and which are no filling."""
    width = max(1, int(mask.sum(axis=1).max(initial=0)))
    columns = np.argsort(~mask, axis=1, kind="stable")[:, :width]
    return columns, np.take_along_axis(mask, columns, axis=1)
