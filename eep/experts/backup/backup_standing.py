"""What the backup services of a host hold, for processes that are no ranks. It imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from eep.experts.registry.directory_registry import DirectoryRegistry

DIRECTORY = "backup"
"""Below the directory of the supervisor: the registry of its backup."""
_RECORDS = "backups/"


class _KeptShape(msgspec.Struct, frozen=True):
    layers: int
    experts: int
    tensor_bytes: tuple[int, ...]


class _Extent(msgspec.Struct, frozen=True):
    numbers: bytes


class _Backup(msgspec.Struct, frozen=True):
    """The part of a service's record that says what it holds."""

    shape: _KeptShape | None
    extents: tuple[_Extent, ...]


@dataclass(frozen=True, slots=True)
class BackupStanding:
    """How many experts, over all layers, are ``held``, of those that there are. ``wanted``: None while that is not known."""

    held: int = 0
    wanted: int | None = None
    bytes: int = 0

    @property
    def is_filled(self) -> bool:
        return self.held == self.wanted


def read_backup(directory: Path) -> BackupStanding:
    """Of the supervisor's ``directory``: nothing is held while no service is there."""
    path = directory / DIRECTORY
    if not path.is_dir():  # a registry would make it
        return BackupStanding()
    return count_backups(DirectoryRegistry(path).scan(_RECORDS))


def count_backups(records: dict[str, bytes]) -> BackupStanding:
    """From the records of a registry. An expert that two services hold counts once."""
    numbers, shape = set[bytes](), None
    for value in records.values():
        try:
            told = msgspec.msgpack.decode(value, type=_Backup)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if told.shape is None:
            continue
        shape = told.shape
        for extent in told.extents:
            numbers.update(extent.numbers[at : at + 8] for at in range(0, len(extent.numbers), 8))
    if shape is None:
        return BackupStanding()
    return BackupStanding(len(numbers), shape.layers * shape.experts, len(numbers) * sum(shape.tensor_bytes))
