"""Copies of every expert on two hosts, where slots allow: then any one host may go. Pure, like ``packing``.

``place_copies`` looks at one copy after the other. Where hosts have different numbers of ranks it may use up the small ones,
and leave the last experts with one host. What is here never does: each expert gets the two hosts that have most room left.
"""

from __future__ import annotations

import numpy as np

from eep.experts.placement.packing import BoolArray, Cluster, FloatArray, IntArray, find_owned, write_into_empty


def can_spread(experts: int, cluster: Cluster) -> bool:
    """Whether there are slots for copies of every expert on two hosts."""
    if cluster.hosts < 2 or cluster.max_copies < 2:
        return False
    return int(np.minimum(_slots_of_hosts(cluster), experts).sum()) >= 2 * experts


def find_hosts(slot_expert: IntArray, experts: int, cluster: Cluster) -> BoolArray:
    """``[layers, hosts, experts]``: which host has which expert."""
    owned = find_owned(slot_expert, experts, cluster.slots_per_rank)
    return np.stack([owned[:, cluster.host == host].any(axis=1) for host in range(cluster.hosts)], axis=1)


def spread_copies(slot_expert: IntArray, load: FloatArray, cluster: Cluster) -> None:
    """Put two copies of every expert into slots that are all empty, in place, on two hosts each. There must be room for it
    (:func:`can_spread`). The hottest expert comes first, and a copy goes onto the coolest rank of a host with most room."""
    layers, experts = load.shape
    line = np.arange(layers)
    room = np.tile(np.minimum(_slots_of_hosts(cluster), experts), (layers, 1))
    free = np.full((layers, cluster.ranks), cluster.slots_per_rank)
    busy = np.zeros((layers, cluster.ranks))
    for expert in np.argsort(-load, axis=1, kind="stable").T:
        share = load[line, expert] / 2
        used = np.zeros((layers, cluster.hosts), dtype=bool)
        for _ in range(2):
            left = np.where(used, -1, room)
            roomiest = left == left.max(axis=1)[:, None]
            possible = roomiest[:, cluster.host] & (free > 0)
            rank = np.where(possible, busy, np.inf).argmin(axis=1)
            host = cluster.host[rank]
            write_into_empty(slot_expert, line, rank, expert, cluster.slots_per_rank)
            used[line, host] = True
            room[line, host] -= 1
            free[line, rank] -= 1
            busy[line, rank] += share


def _slots_of_hosts(cluster: Cluster) -> IntArray:
    return np.asarray(np.bincount(cluster.host, minlength=cluster.hosts) * cluster.slots_per_rank)
