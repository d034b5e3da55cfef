"""What an instance could lose right now: what an operator asks before taking a rank away. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eep.experts.placement.packing import find_owned
from eep.experts.placement.slot_plan import Placement


@dataclass(frozen=True, slots=True)
class Margin:
    """Losses after which every expert that is served now still has a live copy, without any repair.

    Any ``any_ranks`` ranks could go together, and any ``any_hosts`` hosts. ``ranks`` could go one at a time, ``pairs`` two at
    a time, ``hosts`` one at a time.
    ``repairable_ranks`` is how many ranks, any of them, could go before there are fewer slots than experts; their
    experts would come back from memory or disk.
    """

    any_ranks: int
    ranks: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    hosts: tuple[int, ...]
    repairable_ranks: int
    any_hosts: int


def find_margin(placement: Placement, active: Sequence[int], topology: Sequence[int]) -> Margin:
    """What ``placement`` on the ``active`` ranks survives; ``topology[rank]`` is the host of each rank."""
    ranks = np.array(sorted(set(active)), dtype=np.int64)
    if not len(ranks):
        return Margin(0, (), (), (), 0, 0)
    if ranks[0] < 0 or ranks[-1] >= placement.max_ranks or len(topology) != placement.max_ranks:
        raise ValueError(
            f"the placement is for {placement.max_ranks} ranks; active ranks {ranks.tolist()} and "
            f"a topology of {len(topology)} do not fit it"
        )
    owned = find_owned(placement.physical_to_logical, placement.experts, placement.slots_per_rank)[:, ranks]
    served = owned.any(axis=1)
    # The last rank cannot go, even when it holds nothing: one must be left to serve.
    several = len(ranks) > 1
    holders = owned.sum(axis=1)
    fewest = int(holders[served].min()) if served.any() else len(ranks)
    needed = (owned & (holders == 1)[:, None, :]).any(axis=(0, 2))
    safe = ~needed & several

    both_needed = np.zeros((len(ranks), len(ranks)), dtype=bool)
    layer, expert = np.nonzero(holders == 2)
    held_by = np.nonzero(owned.transpose(0, 2, 1)[layer, expert])[1].reshape(-1, 2)
    both_needed[held_by[:, 0], held_by[:, 1]] = True
    first, second = np.nonzero(np.triu(safe[:, None] & safe[None, :] & ~both_needed, k=1))
    pairs = zip(ranks[first].tolist(), ranks[second].tolist(), strict=True) if len(ranks) > 2 else ()

    host = np.asarray(topology)[ranks]
    hosts = np.unique(host)
    on_host = np.stack([owned[:, host == h].any(axis=1) for h in hosts])
    holding = on_host.sum(axis=0)
    lasting = [
        int(h) for h, has in zip(hosts, on_host, strict=True) if len(hosts) > 1 and not (has & (holding == 1)).any()
    ]
    fewest_hosts = int(holding[served].min()) if served.any() else len(hosts)
    enough = -(-int(served.sum(axis=1).max()) // placement.slots_per_rank)
    return Margin(
        fewest - 1,
        tuple(ranks[safe].tolist()),
        tuple(pairs),
        tuple(lasting),
        max(0, len(ranks) - max(1, enough)),
        fewest_hosts - 1,
    )
