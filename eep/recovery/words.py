"""Each rank of a view says one number, and all hear all of them."""

from __future__ import annotations

import ctypes

from eep.abi.collectives import CollectiveArgs, Element, Kind
from eep.process_group.world import World


class WordExchange:
    """``name``: that of its lane, the same on every rank and used for nothing else."""

    def __init__(self, world: World, name: str) -> None:
        self._lane = world.open_lane(name, range(world.endpoint.max_ranks))

    def exchange(self, word: int, timeout: float) -> dict[int, int]:
        """What each rank says. ``timeout``: how many seconds a peer may take. Raises :class:`eep.StepFailed` if one is lost
        meanwhile."""
        size = len(self._lane.ranks)
        mine, heard = ctypes.c_uint64(word), (ctypes.c_uint64 * size)()
        first, step = ctypes.addressof(heard), ctypes.sizeof(ctypes.c_uint64)
        blocks = (ctypes.c_void_p * size)(*(first + step * rank for rank in range(size)))
        args = CollectiveArgs(kind=Kind.ALL_GATHER, element=Element.BYTES, bytes=step, out_blocks=blocks)
        args.in_ = ctypes.addressof(mine)
        answered = self._lane.call("asking what all have staged", args, timeout)
        return {rank: heard[rank] for rank in range(size) if answered >> rank & 1}
