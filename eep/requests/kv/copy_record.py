"""How much of its contexts each rank has copied to host memory, as it says itself and ``eep status`` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.experts.registry.rank_records import publish_of_rank, read_of_ranks

_DIRECTORY = "kv-copies"
"""Below the directory of the supervisor. What ranks look through when a view changes lies elsewhere: these records are
written every second."""


class CopyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``bytes`` of host memory hold ``room_tokens``. ``covered_tokens`` of open requests are there; ``lag_tokens``, in whole
    pages, are not."""

    bytes: int
    room_tokens: int
    covered_tokens: int
    lag_tokens: int


class CopyTeller:
    """A rank's side. ``directory``: that of its supervisor."""

    def __init__(self, directory: Path, rank: int, life: int) -> None:
        self._registry, self._rank, self._life = DirectoryRegistry(directory / _DIRECTORY), rank, life
        self._registry.sweep()  # its keys name an incarnation, so none is ever used again

    def tell(self, record: CopyRecord) -> None:
        publish_of_rank(self._registry, "", self._rank, self._life, record)

    def close(self) -> None:
        self._registry.close()


def read_copies(directory: Path, lives: Mapping[int, int]) -> dict[str, Any] | None:
    """The sums over the ranks of a host that are in: ``lives`` has the incarnation of each. None if no rank copies."""
    found = read_of_ranks(directory / _DIRECTORY, "", CopyRecord, lives)
    if not found:
        return None
    return {name: sum(getattr(each, name) for each in found.values()) for name in CopyRecord.__struct_fields__}
