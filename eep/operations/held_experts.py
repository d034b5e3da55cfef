"""Which experts the ranks of a host hold, from what they say in their registry, and how many ranks of other hosts hold each.
It imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from eep.experts.elsewhere_record import ELSEWHERE, decode_elsewhere
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.experts.view_record import HELD_DIRECTORY

_PREFIX = "held/"
_NAME = re.compile(r"r(\d+)\.i(\d+)")
_MOST_CELLS = 1 << 22


class _Shape(msgspec.Struct, frozen=True):
    layers: int
    experts: int


class _Held(msgspec.Struct, frozen=True):
    """The part of a rank's record that says what it holds."""

    shape: _Shape
    numbers: bytes


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """``copies[layer][expert]``: how many ranks hold it. ``by_rank``: how many experts, over all layers, each rank holds."""

    copies: list[list[int]]
    by_rank: dict[int, int]

    @property
    def uncovered(self) -> int:
        """How many experts no rank holds."""
        return sum(count == 0 for layer in self.copies for count in layer)


def count_held(records: dict[str, bytes], lives: dict[int, int]) -> HeldExperts:
    """From the records of a registry. ``lives``: the incarnation of each rank that is in; others hold nothing."""
    copies, by_rank = np.zeros((0, 0), dtype=np.int64), {}
    for key, value in records.items():
        match = _NAME.fullmatch(key.removeprefix(_PREFIX))
        if match is None or lives.get(int(match[1])) != int(match[2]):
            continue
        try:
            held = msgspec.msgpack.decode(value, type=_Held)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        layers, experts = held.shape.layers, held.shape.experts
        if not 0 < layers * experts <= _MOST_CELLS or len(held.numbers) % 8:
            continue
        if not copies.size:
            copies = np.zeros((layers, experts), dtype=np.int64)
        numbers = np.unique(np.frombuffer(held.numbers, dtype="<i8"))
        numbers = numbers[(numbers >= 0) & (numbers < layers * experts)]
        by_rank[int(match[1])] = len(numbers)
        if copies.shape == (layers, experts):
            copies.reshape(-1)[numbers] += 1
    elsewhere = decode_elsewhere(records.get(ELSEWHERE, b""))
    if elsewhere is not None and elsewhere.shape == copies.shape:
        copies += elsewhere
    return HeldExperts(copies.tolist(), by_rank)


def read_held(experts: Path, lives: dict[int, int]) -> HeldExperts:
    """The same, from the directory of a host's experts."""
    path = experts / HELD_DIRECTORY
    if not path.is_dir():  # a registry would make it
        return HeldExperts([], {})
    registry = DirectoryRegistry(path)
    return count_held({**registry.scan(_PREFIX), **registry.scan(ELSEWHERE)}, lives)
