"""Which copies make room for experts that have none left. Pure, like ``packing``."""

from __future__ import annotations

import numpy as np

from eep.experts.placement.packing import (
    EMPTY,
    BoolArray,
    Cluster,
    FloatArray,
    IntArray,
    count_copies,
    find_owned,
    pad_columns,
    rank_loads,
)

_MOST_STRAIN = 1e9  # beyond that its power is no longer a number
_LAST_COPIES = 1e300  # more than any strain: such a copy goes only when all others are gone


def evict(slot_expert: IntArray, load: FloatArray, victims: IntArray, incoming: FloatArray, cluster: Cluster) -> None:
    """Empty ``victims[layer]`` slots of each layer, in place, and never the last copy of an expert.

    An expert of load ``incoming[layer]`` takes the place of a victim, and the victim's other copies take over its
    share. The slot to go is the one that leaves the ranks most even after that. Measured by squares instead of
    ``_strain``, the busiest rank was up to a tenth busier after a loss.
    """
    if not victims.any():
        return
    layers, experts = load.shape
    count = count_copies(slot_expert, experts)
    surplus = (slot_expert != EMPTY) & (np.take_along_axis(count, np.maximum(slot_expert, 0), axis=1) > 1)
    slots, there = pad_columns(surplus)
    expert = np.maximum(np.take_along_axis(slot_expert, slots, axis=1), 0)
    rank = slots // cluster.slots_per_rank
    alone = np.where(count == 1, load, 0.0)
    steady = rank_loads(slot_expert, alone, count, cluster.slots_per_rank)
    expert_at = expert + np.arange(layers)[:, None] * experts
    rank_at = rank + np.arange(layers)[:, None] * cluster.ranks
    weight_of = np.take_along_axis(load, expert, axis=1)
    fair = np.maximum(load.sum(axis=1) / cluster.ranks, 1e-300)[:, None]
    on_host = _count_on_hosts(slot_expert, experts, cluster)
    layer = np.arange(layers)[:, None]
    left = victims.copy()
    while left.any():
        # Padding and copies that are gone serve nothing; they must not count as holders either.
        others = count.ravel()[expert_at] - 1
        served = np.where(there, weight_of / np.maximum(others + 1, 1), 0.0)
        busy = np.bincount(rank_at.ravel(), served.ravel(), minlength=steady.size).reshape(steady.shape)
        busy = (steady + busy).ravel()[rank_at]
        handed_over = np.where(there, served / np.maximum(others, 1), 0.0)
        now = _strain(busy, fair)
        more = np.where(there, _strain(busy + handed_over, fair) - now, 0.0)
        around = np.bincount(expert_at.ravel(), more.ravel(), minlength=load.size)[expert_at] - more
        cost = _strain(busy - served + incoming[:, None], fair) - now + around
        dear = others < cluster.least_copies
        if cluster.least_copies > 1:
            # Without it a host could not be lost.
            only = on_host[layer, cluster.host[rank], expert] == 1
            dear |= only & ((on_host > 0).sum(axis=1)[layer, expert] == 2)
        cost = np.where(dear, cost + _LAST_COPIES, cost)
        cost = np.where(there & (others > 0), cost, np.inf)

        # Many at a time while there are many to go: those that have nothing to do with each other.
        number = max(1, int(left.max()) // 16)
        best = np.argsort(cost, axis=1, kind="stable")[:, :number] if number > 1 else cost.argmin(axis=1)[:, None]
        chosen = np.isfinite(np.take_along_axis(cost, best, axis=1)) & _unrelated(expert, best)
        chosen &= _unrelated(rank, best)
        chosen &= np.cumsum(chosen, axis=1) <= left[:, None]
        assert chosen.any(), "there are not as many surplus copies as victims"
        rows, column = np.nonzero(chosen)
        choice = best[rows, column]
        slot_expert[rows, slots[rows, choice]] = EMPTY
        count[rows, expert[rows, choice]] -= 1
        on_host[rows, cluster.host[rank[rows, choice]], expert[rows, choice]] -= 1
        there[rows, choice] = False
        steady[rows, rank[rows, choice]] += incoming[rows]
        left -= chosen.sum(axis=1)


def _count_on_hosts(slot_expert: IntArray, experts: int, cluster: Cluster) -> IntArray:
    """``[layers, hosts, experts]``: how many ranks of each host have each expert."""
    owned = find_owned(slot_expert, experts, cluster.slots_per_rank)
    return np.stack([owned[:, cluster.host == host].sum(axis=1) for host in range(cluster.hosts)], axis=1)


def _strain(pressure: FloatArray, fair: FloatArray) -> FloatArray:
    """The 32nd power. Summed over ranks it is nearly a matter of the busiest one, and still tells the others apart."""
    strain = np.minimum(pressure / fair, _MOST_STRAIN)
    for _ in range(5):  # much faster than np.power
        strain *= strain
    return strain


def _unrelated(value: IntArray, best: IntArray) -> BoolArray:
    """Whether the value of each of the ``best`` is none that an earlier one has."""
    mine = np.take_along_axis(value, best, axis=1)
    twins = mine[:, :, None] == mine[:, None, :]
    return np.asarray(~np.tril(twins, k=-1).any(axis=2))
