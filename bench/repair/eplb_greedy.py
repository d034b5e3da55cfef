"""The yardstick: the greedy global balancer that DeepSeek published as EPLB, written anew from its
description.

It takes two steps per layer (https://github.com/deepseek-ai/EPLB, "global load balancing"). Every redundant
slot goes, one after the other, to the expert whose load per replica is then the highest. Then each replica,
the hottest first, goes to the rank with the least load among those with room. The balancer ignores where
experts lie already, differences between ranks, and two replicas on one rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def eplb_greedy(load: npt.NDArray[np.float64], ranks: int, slots_per_rank: int) -> npt.NDArray[np.int64]:
    """``physical_to_logical[layers, ranks * slots_per_rank]`` for ``load[layers, experts]``."""
    layers, experts = load.shape
    slots = ranks * slots_per_rank
    if slots < experts:
        raise ValueError(f"{slots} slots cannot hold {experts} experts")
    result = np.empty((layers, slots), dtype=np.int64)
    for layer in range(layers):
        owner = np.arange(slots)
        count = np.ones(experts)
        for replica in range(experts, slots):
            owner[replica] = (load[layer] / count).argmax()
            count[owner[replica]] += 1
        share = (load[layer] / count)[owner]
        pack_load, pack_size = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
        for replica in np.argsort(-share, kind="stable"):
            pack = np.where(pack_size < slots_per_rank, pack_load, np.inf).argmin()
            result[layer, pack * slots_per_rank + pack_size[pack]] = owner[replica]
            pack_load[pack] += share[replica]
            pack_size[pack] += 1
    return result
