"""What ranks tell each other when they enter an epoch: what each has yet to run again, and which placement it has made.

Everybody hears everybody or the exchange fails, so all come to the same conclusions from the same words.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from eep.abi.collectives import CollectiveArgs, Element, Kind
from eep.process_group.world import World

_LANE = "eep/session"


class _Packed(ctypes.Structure):
    _fields_ = (("digest", ctypes.c_uint64), ("through", ctypes.c_uint64), ("steps", ctypes.c_uint64))


@dataclass(frozen=True, slots=True)
class Word:
    """Of one rank."""

    digest: int
    """Of its placement; 0 if it could not do its part."""
    steps: int
    """How many it has to run again."""
    buffer: int | None
    """The number of the buffer that the oldest of them goes through; None if there is none."""


class Intents:
    """The exchange of words between all ranks of a view."""

    def __init__(self, world: World, timeout: float) -> None:
        """``timeout``: how many seconds a peer may take to say its word."""
        self._lane = world.open_lane(_LANE, range(world.endpoint.max_ranks))
        self._timeout = timeout

    def exchange(self, mine: Word) -> dict[int, Word]:
        """The words of all ranks, this one's among them. :class:`eep.StepFailed` if somebody was lost meanwhile."""
        size = len(self._lane.ranks)
        out, heard = _pack(mine), (_Packed * size)()
        blocks = (ctypes.c_void_p * size)(*(ctypes.addressof(each) for each in heard))
        args = CollectiveArgs(
            kind=Kind.ALL_GATHER, element=Element.BYTES, bytes=ctypes.sizeof(_Packed), out_blocks=blocks
        )
        args.in_ = ctypes.addressof(out)
        answered = self._lane.call("entering an epoch", args, self._timeout)
        return {rank: _unpack(heard[rank]) for rank in range(size) if answered >> rank & 1}


def buffers_in_order(words: Mapping[int, Word]) -> list[int]:
    """Those through which somebody runs a step again, in the order in which all ranks do so."""
    return sorted({word.buffer for word in words.values() if word.buffer is not None})


def somebody_has_more(words: Mapping[int, Word]) -> bool:
    """Whether after each has run its oldest step again, somebody has yet another."""
    return any(word.steps > 1 for word in words.values())


def _pack(word: Word) -> _Packed:
    return _Packed(word.digest, 0 if word.buffer is None else 1 + word.buffer, word.steps)


def _unpack(packed: _Packed) -> Word:
    return Word(int(packed.digest), int(packed.steps), int(packed.through) - 1 if packed.through else None)
