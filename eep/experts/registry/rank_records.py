"""Small records that each rank publishes about itself, for processes that are no ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from eep.experts.registry.directory_registry import DirectoryRegistry, Registry

_NAME = re.compile(r"r(\d{1,9})\.i(\d{1,9})")
_Record = TypeVar("_Record", bound=msgspec.Struct)


def publish_of_rank(registry: Registry, prefix: str, rank: int, life: int, record: msgspec.Struct) -> None:
    registry.publish(f"{prefix}r{rank}.i{life}", msgspec.json.encode(record))


def read_of_ranks(path: Path, prefix: str, kind: type[_Record], lives: Mapping[int, int]) -> dict[int, _Record]:
    """The record of each rank that has published one in the directory of a registry. ``lives``: the incarnation of each rank
    that is in."""
    if not path.is_dir():  # a registry would make it
        return {}
    found = {}
    for key, value in DirectoryRegistry(path).scan(prefix).items():
        match = _NAME.fullmatch(key.removeprefix(prefix))
        if match is None or lives.get(int(match[1])) != int(match[2]):
            continue
        try:
            found[int(match[1])] = msgspec.json.decode(value, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return found
