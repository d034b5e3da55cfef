"""What ranks tell each other when they enter an epoch: which steps each must run again, and which placement it has made.

Either every rank hears every other or the exchange fails. So all ranks draw the same conclusions from the same intents.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from eep.abi.collectives import CollectiveArgs, Element, Kind
from eep.process_group.world import World

_LANE = "eep/session"


class _PackedIntent(ctypes.Structure):
    _fields_ = (
        ("digest", ctypes.c_uint64),
        ("through", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        ("owed", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Intent:
    """What one rank will do in this epoch."""

    digest: int
    """Of the placement that the rank has made; 0 if it could not do its part of the repair."""
    steps: int
    """How many steps the rank must run again."""
    buffer: int | None
    """The number of the buffer that the oldest of these steps goes through; None if there is none."""
    owed: int | None = None
    """The number of the buffer of a step that all ranks agreed on before, and that this rank has yet to begin."""


class IntentExchange:
    """Carries the intents between all ranks of a view."""

    def __init__(self, world: World, timeout: float) -> None:
        """``timeout``: how many seconds a peer may take to tell its intent."""
        self._lane = world.open_lane(_LANE, range(world.endpoint.max_ranks))
        self._timeout = timeout

    def exchange(self, mine: Intent) -> dict[int, Intent]:
        """The intents of all ranks, this one's among them. Raises :class:`eep.StepFailed` if a peer is lost meanwhile."""
        size = len(self._lane.ranks)
        out, heard = _pack(mine), (_PackedIntent * size)()
        blocks = (ctypes.c_void_p * size)(*(ctypes.addressof(each) for each in heard))
        args = CollectiveArgs(
            kind=Kind.ALL_GATHER, element=Element.BYTES, bytes=ctypes.sizeof(_PackedIntent), out_blocks=blocks
        )
        args.in_ = ctypes.addressof(out)
        answered = self._lane.call("entering an epoch", args, self._timeout)
        return {rank: _unpack(heard[rank]) for rank in range(size) if answered >> rank & 1}


def agreed_digest(intents: Mapping[int, Intent]) -> int:
    """The digest of the placement that most ranks have made; of several that are made as often, that of the lowest rank."""
    makers = Counter(intent.digest for intent in intents.values())
    most = max(makers.values())
    return next(intents[rank].digest for rank in sorted(intents) if makers[intents[rank].digest] == most)


def buffers_in_order(intents: Mapping[int, Intent]) -> list[int]:
    """The buffers through which any rank runs a step again, in the order in which all ranks use them."""
    return sorted({intent.buffer for intent in intents.values() if intent.buffer is not None})


def steps_remain(intents: Mapping[int, Intent]) -> bool:
    """Whether any rank has yet another step to run again, after each has repeated its oldest."""
    return any(intent.steps > 1 for intent in intents.values())


def owed_buffer(intents: Mapping[int, Intent]) -> int | None:
    """The buffer of the step that some ranks have yet to begin; None if there is none. They agreed on one step, so on one
    buffer."""
    return min((intent.owed for intent in intents.values() if intent.owed is not None), default=None)


def _pack(intent: Intent) -> _PackedIntent:
    return _PackedIntent(intent.digest, _pack_buffer(intent.buffer), intent.steps, _pack_buffer(intent.owed))


def _unpack(packed: _PackedIntent) -> Intent:
    return Intent(
        int(packed.digest), int(packed.steps), _unpack_buffer(int(packed.through)), _unpack_buffer(int(packed.owed))
    )


def _pack_buffer(buffer: int | None) -> int:
    return 0 if buffer is None else 1 + buffer


def _unpack_buffer(packed: int) -> int | None:
    return packed - 1 if packed else None
