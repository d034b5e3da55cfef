"""Even out the ranks by exchanging the experts of two slots, time and again. Pure, like ``packing``."""

from __future__ import annotations

import numpy as np

from eep.experts.packing import EMPTY, BoolArray, Cluster, FloatArray, IntArray, copies, holds, slot_loads


def even_out(
    slot_expert: IntArray, movable: BoolArray, load: FloatArray, cluster: Cluster, rounds: int
) -> None:
    """Exchange, in place, one movable slot of the busiest rank with a movable slot elsewhere, ``rounds``
    times.

    Each exchange is the one that leaves the busier of the two ranks least busy; a layer in which none helps
    is done. No exchange puts two copies of an expert on one rank, or onto one host where they were apart.
    """
    experts = load.shape[1]
    size = cluster.slots_per_rank
    rank_of = np.arange(slot_expert.shape[1]) // size
    host_of = cluster.host[rank_of]
    speed = cluster.weight
    served = slot_loads(slot_expert, load, copies(slot_expert, experts))
    owned = holds(slot_expert, experts, size)
    on_host = np.stack([owned[:, cluster.host == host].any(axis=1) for host in range(cluster.hosts)], axis=1)
    movable = movable & (slot_expert != EMPTY)
    rows = np.flatnonzero(movable.any(axis=1))
    for _ in range(rounds):
        if not len(rows):
            return
        busy = served[rows].reshape(len(rows), cluster.ranks, size).sum(axis=2)
        worst = (busy / speed).argmax(axis=1)
        at = np.arange(len(rows))
        mine = worst[:, None] * size + np.arange(size)
        my_expert, my_load = slot_expert[rows[:, None], mine], served[rows[:, None], mine]
        expert = np.maximum(slot_expert[rows], 0)

        # One row per layer, one line per slot of its busiest rank, one column per slot that it might exchange
        # with.
        shift = my_load[:, :, None] - served[rows][:, None, :]
        after_mine = (busy[at, worst][:, None, None] - shift) / speed[worst][:, None, None]
        after_theirs = (busy[:, rank_of][:, None, :] + shift) / speed[rank_of]
        result = np.maximum(after_mine, after_theirs)

        i_may_come = ~owned[rows[:, None], :, np.maximum(my_expert, 0)][:, :, rank_of]
        they_may_come = ~owned[rows, worst][at[:, None], expert]
        same_host = host_of == cluster.host[worst][:, None]
        i_stay_apart = ~on_host[rows[:, None], :, np.maximum(my_expert, 0)][:, :, host_of]
        they_stay_apart = ~on_host[rows, cluster.host[worst]][at[:, None], expert]
        allowed = i_may_come & (i_stay_apart | same_host[:, None, :])
        allowed &= (they_may_come & (they_stay_apart | same_host) & movable[rows])[:, None, :]
        allowed &= movable[rows[:, None], mine][:, :, None]

        result = np.where(allowed, result, np.inf).reshape(len(rows), -1)
        best = result.argmin(axis=1)
        helps = result[at, best] < (busy / speed)[at, worst] * (1 - 1e-9)
        rows, best, worst = rows[helps], best[helps], worst[helps]
        here, there = worst * size + best // slot_expert.shape[1], best % slot_expert.shape[1]
        _exchange(slot_expert, served, owned, on_host, rows, here, there, cluster)


def _exchange(
    slot_expert: IntArray,
    served: FloatArray,
    owned: BoolArray,
    on_host: BoolArray,
    rows: IntArray,
    here: IntArray,
    there: IntArray,
    cluster: Cluster,
) -> None:
    for table in (slot_expert, served):
        table[rows, here], table[rows, there] = table[rows, there], table[rows, here]
    for slot, other in ((here, there), (there, here)):
        rank, left = slot // cluster.slots_per_rank, other // cluster.slots_per_rank
        expert = slot_expert[rows, slot]
        owned[rows, left, expert] = False
        owned[rows, rank, expert] = True
    for slot in (here, there):
        for rank in (here // cluster.slots_per_rank, there // cluster.slots_per_rank):
            expert, host = slot_expert[rows, slot], cluster.host[rank]
            held = owned[rows, :, expert] & (cluster.host == host[:, None])
            on_host[rows, host, expert] = held.any(axis=1)
