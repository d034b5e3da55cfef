"""Each rank of a view says something of a fixed size, and all hear all of it."""

from __future__ import annotations

import ctypes

from eep.abi.collectives import CollectiveArgs, Element, Kind
from eep.process_group.world import World

_WORD = 8


class BytesExchange:
    """``name``: that of its lane, the same on every rank and used for nothing else. ``size``: how many bytes each says."""

    def __init__(self, world: World, name: str, size: int, purpose: str = "asking what all have") -> None:
        self._lane = world.open_lane(name, range(world.endpoint.max_ranks))
        self._size, self._purpose = size, purpose

    def exchange(self, said: bytes, timeout: float) -> dict[int, bytes]:
        """What each rank says. ``timeout``: how many seconds a peer may take. Raises :class:`eep.StepFailed` if one is lost
        meanwhile."""
        if len(said) != self._size:
            raise ValueError(f"ranks say {self._size} bytes here, and these are {len(said)}")
        ranks, size = len(self._lane.ranks), self._size
        mine, heard = ctypes.create_string_buffer(said, size), ctypes.create_string_buffer(ranks * size)
        first = ctypes.addressof(heard)
        blocks = (ctypes.c_void_p * ranks)(*(first + size * rank for rank in range(ranks)))
        args = CollectiveArgs(kind=Kind.ALL_GATHER, element=Element.BYTES, bytes=size, out_blocks=blocks)
        args.in_ = ctypes.addressof(mine)
        answered = self._lane.call(self._purpose, args, timeout)
        return {rank: heard.raw[rank * size : (rank + 1) * size] for rank in range(ranks) if answered >> rank & 1}


class WordExchange:
    """The same for one number of 64 bits."""

    def __init__(self, world: World, name: str) -> None:
        self._bytes = BytesExchange(world, name, _WORD, "asking what all have staged")

    def exchange(self, word: int, timeout: float) -> dict[int, int]:
        heard = self._bytes.exchange(word.to_bytes(_WORD, "little"), timeout)
        return {rank: int.from_bytes(said, "little") for rank, said in heard.items()}
