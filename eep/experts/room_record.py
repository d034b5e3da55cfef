"""How much of its KV cache each rank has given up, as it says itself and ``eep status`` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from eep.experts.registry.directory_registry import Registry
from eep.experts.registry.rank_records import publish_of_rank, read_of_ranks
from eep.experts.view_record import HELD_DIRECTORY

_PREFIX = "room/"


class RoomRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``bytes``: how much is to go, of which a part may still be in use. ``tokens``: for how many tokens less the cache has
    entries now."""

    bytes: int
    tokens: int


def publish_room(registry: Registry, rank: int, life: int, record: RoomRecord) -> None:
    publish_of_rank(registry, _PREFIX, rank, life, record)


def read_rooms(experts: Path, lives: Mapping[int, int]) -> dict[int, RoomRecord]:
    """Of each rank that has said so. ``lives``: the incarnation of each rank that is in."""
    return read_of_ranks(experts / HELD_DIRECTORY, _PREFIX, RoomRecord, lives)
