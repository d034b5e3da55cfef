"""Checksums of experts that were loaded elsewhere: which source has them, and what if none has."""

from __future__ import annotations

from pathlib import Path

import pytest

from eep.experts.coverage import LACKING
from eep.experts.repair.executor import RepairFailed
from eep.view import View
from tests.experts import model
from tests.experts.covered import RANKS, Rank, ranks


def late_to_say_what_it_holds(directory: Path, disk: Path) -> dict[int, Rank]:
    """Rank 2 is in the view, and says a moment later what it holds: the others do not know its checksums."""
    view = View(1, (0, 1, 2, 3), (0,) * RANKS)
    group = {rank: Rank(directory / "e", rank, 3, disk) for rank in (0, 1, 3)}
    for rank in group.values():
        rank.coverage.repair(view)
    group[2] = Rank(directory / "e", 2, 3, disk)
    group[2].coverage.repair(view)
    assert not group[0].sums.known.all()
    return group


def test_who_can_learn_a_checksum_from_nowhere_waits_for_another_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = model.save_checkpoint(tmp_path / "model")
    group = late_to_say_what_it_holds(tmp_path, disk)
    group[2].close()
    (disk / "model.safetensors").rename(disk / "away")
    smaller = View(2, (0, 1, 3), (0,) * RANKS)
    held = group[0].coverage._slots.table.copy()
    assert group[0].coverage.repair(smaller) == LACKING
    assert (group[0].coverage._slots.table == held).all(), "nothing was written, so what it held is there still"
    assert "cannot be read" in caplog.text
    # The checkpoint is there again, and with it what had been lost.
    (disk / "away").rename(disk / "model.safetensors")
    assert group[0].coverage.repair(View(3, (0, 1, 3), (0,) * RANKS))
    group[0].check()
    for rank in group.values():
        rank.close()


def test_who_cannot_check_what_it_was_started_with_ends(tmp_path: Path) -> None:
    disk = model.save_checkpoint(tmp_path / "model")
    with ranks(tmp_path, 3, disk) as group:
        (disk / "model.safetensors").rename(disk / "away")
        for rank in (1, 2, 3):
            group[rank].close()
        group[0].coverage._slots.table[:] = -1
        group[0].sums.known[:] = False
        with pytest.raises(RepairFailed, match="cannot be read"):
            group[0].coverage.repair(View(1, (0, 1, 2, 3), (0,) * RANKS))


def test_how_many_checksums_only_the_checkpoint_knew_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    group = late_to_say_what_it_holds(tmp_path, model.save_checkpoint(tmp_path / "model"))
    group[2].close()
    unknown = int((~group[0].sums.known).sum())
    assert group[0].coverage.repair(View(2, (0, 1, 3), (0,) * RANKS))
    learnt = unknown - int((~group[0].sums.known).sum())
    assert learnt
    assert f"{learnt} checksums were taken from the checkpoint itself" in caplog.text
    group[0].check()
    for rank in group.values():
        rank.close()
