"""What ranks tell each other when they enter an epoch: which steps each must run again, and which placement it has made.

Either every rank hears every other or the exchange fails. So all ranks draw the same conclusions from the same intents.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from eep.abi.collectives import CollectiveArgs, Element, Kind
from eep.data_plane.passage import Passage
from eep.process_group.world import World

_LANE = "eep/session"
_BUFFER_BITS = 8


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
    passage: Passage | None
    """That of the oldest of these steps; None if there is none."""
    owed: Passage | None = None
    """That of a step which all ranks agreed on before, and which this rank has yet to begin."""


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


def passages_in_order(intents: Mapping[int, Intent]) -> list[Passage]:
    """The passages by which any rank runs a step again, in the order in which all ranks take them."""
    return sorted({intent.passage for intent in intents.values() if intent.passage is not None})


def steps_remain(intents: Mapping[int, Intent]) -> bool:
    """Whether any rank has yet another step to run again, after each has repeated its oldest."""
    return any(intent.steps > 1 for intent in intents.values())


def owed_passage(intents: Mapping[int, Intent]) -> Passage | None:
    """That of the step which some ranks have yet to begin; None if there is none. They agreed on one step, so on one
    passage."""
    return min((intent.owed for intent in intents.values() if intent.owed is not None), default=None)


def _pack(intent: Intent) -> _PackedIntent:
    return _PackedIntent(intent.digest, _pack_passage(intent.passage), intent.steps, _pack_passage(intent.owed))


def _unpack(packed: _PackedIntent) -> Intent:
    return Intent(
        int(packed.digest), int(packed.steps), _unpack_passage(int(packed.through)), _unpack_passage(int(packed.owed))
    )


def _pack_passage(passage: Passage | None) -> int:
    """There is no passage without portions, so 0 stands for none."""
    return 0 if passage is None else passage.portions << _BUFFER_BITS | passage.buffer


def _unpack_passage(packed: int) -> Passage | None:
    return Passage(packed & (1 << _BUFFER_BITS) - 1, packed >> _BUFFER_BITS) if packed else None
