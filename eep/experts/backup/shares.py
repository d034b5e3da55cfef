"""Which backup service keeps which expert. Pure; every service computes its own share from the same records.

A hash of both names ranks the services for each expert (rendezvous hashing). So services agree without talking,
shares are even, and when one is lost only its share moves. A service keeps what it holds already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from eep.experts.placement.packing import BoolArray, IntArray
from eep.experts.repair.repair_plan import BackupContents

NOWHERE = -1
"""In place of an only host: no rank, or ranks of several hosts, hold the expert."""


def find_only_hosts(held_by_host: Mapping[int, BoolArray], number: int) -> IntArray:
    """The host of each expert that is live on one host only, else ``NOWHERE``."""
    count = np.zeros(number, dtype=np.int64)
    host_of = np.full(number, NOWHERE, dtype=np.int64)
    for host, held in held_by_host.items():
        count += held
        host_of[held] = host
    return np.where(count == 1, host_of, NOWHERE)


def choose_share(name: str, services: Mapping[str, BackupContents], only_host: IntArray, replicas: int) -> BoolArray:
    """The experts that the service ``name`` should add to those it holds. ``held`` counts over all layers.

    Every expert gets ``replicas`` copies, at most one per host. Where there are several hosts, one copy at
    least is on another host than the only one that serves the expert, if need be beyond ``replicas``.
    """
    number = len(only_host)
    order = sorted(services)
    hosts = np.array([services[each].host for each in order])
    held = np.array([services[each].held for each in order]).reshape(len(order), number)
    score = np.array([_scores(each, number) for each in order]).reshape(len(order), number)

    several = len(set(hosts.tolist())) > 1
    kept = held.copy()
    safe = (held & (hosts[:, None] != only_host[None, :])).any(axis=0) | (only_host == NOWHERE) | (not several)
    # The first copy that an expert still needs goes where the loss of its only host cannot reach it.
    for _ in range(max(1, replicas)):
        used = np.zeros((len(order), number), dtype=bool)
        for host in set(hosts.tolist()):
            used[hosts == host] = kept[hosts == host].any(axis=0)
        missing = (kept.sum(axis=0) < min(replicas, len(set(hosts.tolist())))) | ~safe
        allowed = ~used & missing & (safe | (hosts[:, None] != only_host[None, :]))
        best = np.where(allowed, score, 0).argmax(axis=0)
        chosen = allowed[best, np.arange(number)]
        kept[best[chosen], np.flatnonzero(chosen)] = True
        safe |= chosen
    mine = order.index(name)
    return np.asarray(kept[mine] & ~held[mine])


def _scores(name: str, number: int) -> npt.NDArray[np.uint64]:
    """A pseudo-random number above 0 for each expert, the same on every machine (the mixer of SplitMix64)."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    value = np.arange(1, number + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (value ^ (value >> np.uint64(31))) | np.uint64(1)
