"""What a backup holds, as it is read without the code of the backup."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eep.experts.backup.backup_standing import DIRECTORY, BackupStanding, count_backups, read_backup
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.experts.registry.published_records import BACKUPS, BackupExtent, BackupRecord, ModelShape, encode_record

SHAPE = ModelShape(2, 3, (4, 8))


def record(*extents: list[int], shape: ModelShape | None = SHAPE) -> bytes:
    tables = [np.array(numbers, dtype="<i8").tobytes() for numbers in extents]
    return encode_record(BackupRecord(0, "", shape, tuple(BackupExtent(0, table, table) for table in tables)))


def test_experts_are_counted_once_over_extents_and_services() -> None:
    found = count_backups({"backups/a": record([0, 1], [5]), "backups/b": record([1, 2]), "backups/c": b"no record"})
    assert found == BackupStanding(held=4, wanted=6, bytes=48)
    assert not found.is_filled
    assert count_backups({"backups/a": record([0, 1, 2, 3, 4, 5])}).is_filled


def test_what_is_to_be_held_is_not_known_before_a_service_knows_the_model() -> None:
    assert count_backups({"backups/a": record(shape=None)}) == BackupStanding(0, None, 0)
    assert not count_backups({}).is_filled


def test_a_backup_that_has_ended_holds_nothing(tmp_path: Path) -> None:
    assert read_backup(tmp_path) == BackupStanding()
    assert not list(tmp_path.iterdir()), "asking makes no directory"
    registry = DirectoryRegistry(tmp_path / DIRECTORY)
    registry.publish(f"{BACKUPS}host", record([0]))
    assert read_backup(tmp_path).held == 1
    registry.close()
    assert read_backup(tmp_path) == BackupStanding()
