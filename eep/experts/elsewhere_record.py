"""How many ranks of other hosts hold each expert, for processes of a host that know the records of its own ranks only."""

from __future__ import annotations

import msgspec
import numpy as np

from eep.experts.placement.packing import IntArray
from eep.experts.registry.directory_registry import Registry
from eep.experts.standing import Standing

ELSEWHERE = "elsewhere"
"""Its key in the registry of a host."""


class ElsewhereRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layers: int
    experts: int
    copies: bytes

    def counts(self) -> IntArray | None:
        """``[layers, experts]``; None if the record does not fit together."""
        if self.layers < 1 or self.experts < 1 or len(self.copies) != 8 * self.layers * self.experts:
            return None
        return np.frombuffer(self.copies, dtype="<i8").reshape(self.layers, self.experts).astype(np.int64)


def say_elsewhere(registry: Registry, rank: int, standing: Standing) -> None:
    """The first rank of each host speaks. Nothing is said where there is one host."""
    hosts, active, placement = standing.base.hosts, standing.view.active, standing.placement
    if not hosts or rank != min(each for each in active if hosts[each] == hosts[rank]):
        return
    far = placement.on(each for each in active if hosts[each] != hosts[rank]).replica_counts
    record = ElsewhereRecord(placement.layers, placement.experts, far.astype("<i8").tobytes())
    registry.publish(ELSEWHERE, msgspec.msgpack.encode(record))


def decode_elsewhere(value: bytes) -> IntArray | None:
    try:
        return msgspec.msgpack.decode(value, type=ElsewhereRecord).counts()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
