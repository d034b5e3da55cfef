"""Even out the ranks by exchanging the experts of two slots, again and again. Pure, like ``packing``."""

from __future__ import annotations

from dataclasses import dataclass

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
    slot_loads,
)

_EVEN_ENOUGH = 1.002  # the busiest rank over the mean; what is left is less than loads change from step to step


def even_out(slot_expert: IntArray, movable: BoolArray, load: FloatArray, cluster: Cluster, rounds: int) -> None:
    """Exchange, in place, one movable slot of the busiest rank with a movable slot elsewhere, ``rounds`` times.

    Each exchange is the one that leaves the busier of the two ranks least busy; a layer in which none helps is done. No
    exchange puts two copies of an expert on one rank, or leaves fewer than two hosts to an expert that had as many.
    """
    experts = load.shape[1]
    size = cluster.slots_per_rank
    served = slot_loads(slot_expert, load, count_copies(slot_expert, experts))
    owned = find_owned(slot_expert, experts, size)
    on_host = np.stack([owned[:, cluster.host == host].any(axis=1) for host in range(cluster.hosts)], axis=1)
    movable = movable & (slot_expert != EMPTY)
    slots, there = pad_columns(movable)
    rows = np.flatnonzero(movable.any(axis=1))
    for _ in range(rounds):
        busy = served[rows].reshape(len(rows), cluster.ranks, size).sum(axis=2)
        uneven = busy.max(axis=1) > _EVEN_ENOUGH * busy.mean(axis=1)
        if not uneven.any():
            return
        rows, busy = rows[uneven], busy[uneven]
        at, row = np.arange(len(rows)), rows[:, None]
        worst = busy.argmax(axis=1)
        mine = worst[:, None] * size + np.arange(size)
        my_expert, my_load = np.maximum(slot_expert[row, mine], 0), served[row, mine]
        theirs = slots[rows]
        expert, rank = np.maximum(slot_expert[row, theirs], 0), theirs // size
        host, my_host = cluster.host[rank], cluster.host[worst]

        # One row per layer, one line per slot of its busiest rank, one column per slot to exchange with.
        shift = my_load[:, :, None] - served[row, theirs][:, None, :]
        after_mine = busy[at, worst][:, None, None] - shift
        after_theirs = busy[at[:, None], rank][:, None, :] + shift
        result = np.maximum(after_mine, after_theirs)

        same_host = host == my_host[:, None]
        wide = on_host[rows].sum(axis=1) > 2
        line, column = rows[:, None, None], my_expert[:, :, None]
        i_may_go = ~owned[line, rank[:, None, :], column]
        i_may_go &= (
            ~on_host[line, host[:, None, :], column] | same_host[:, None, :] | wide[at[:, None], my_expert][:, :, None]
        )
        they_may_come = ~owned[row, worst[:, None], expert]
        they_may_come &= ~on_host[row, my_host[:, None], expert] | same_host | wide[at[:, None], expert]
        allowed = i_may_go & (they_may_come & there[rows])[:, None, :] & movable[row, mine][:, :, None]

        result = np.where(allowed, result, np.inf).reshape(len(rows), -1)
        best = result.argmin(axis=1)
        helps = result[at, best] < busy[at, worst] * (1 - 1e-9)
        line_of, column_of = best // theirs.shape[1], best % theirs.shape[1]
        here, other = mine[at, line_of][helps], theirs[at, column_of][helps]
        rows = rows[helps]
        _exchange(_Tables(slot_expert, served, owned, on_host), rows, here, other, cluster)


@dataclass(frozen=True, slots=True)
class _Tables:
    """What an exchange changes: the experts and loads of slots, and which ranks and hosts hold which expert."""

    slot_expert: IntArray
    served: FloatArray
    owned: BoolArray
    on_host: BoolArray


def _exchange(tables: _Tables, rows: IntArray, here: IntArray, there: IntArray, cluster: Cluster) -> None:
    slot_expert, owned = tables.slot_expert, tables.owned
    for table in (slot_expert, tables.served):
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
            tables.on_host[rows, host, expert] = held.any(axis=1)
