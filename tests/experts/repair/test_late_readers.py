"""A reader that outlives its repair still writes into slots: nothing is verified there before it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eep.experts.checkpoint.checkpoint_reader import CheckpointReader
from eep.experts.coverage import LACKING
from eep.experts.repair.executor import RepairFailed, Want
from eep.view import View
from tests.experts import model
from tests.experts.covered import RANKS, Rank, enter, ranks


class Held:
    """Reads of the checkpoint that last until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.under_way = 0
        self._changes = threading.Condition()
        read = CheckpointReader.read

        def held(reader: CheckpointReader, wants: Sequence[Want]) -> None:
            self._count(1)
            try:
                assert self.go.wait(60)
                read(reader, wants)
            finally:
                self._count(-1)

        monkeypatch.setattr(CheckpointReader, "read", held)

    def let_go(self) -> None:
        """Returns once nobody reads any more."""
        self.go.set()
        with self._changes:
            assert self._changes.wait_for(lambda: not self.under_way, 60)

    def _count(self, change: int) -> None:
        with self._changes:
            self.under_way += change
            self._changes.notify_all()


def test_who_still_reads_for_an_earlier_repair_does_not_write_into_what_a_later_one_has_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(1, (0, 1, 2, 3), (0,) * RANKS)
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model")) as group:
        enter(group, view)
        held, mine = Held(monkeypatch), group[0].coverage
        group[2].close()
        monkeypatch.setattr(mine, "_repair_within", 1.0)  # enough for its threads to begin, on a busy machine too
        try:
            assert mine.repair(view.without([2])) == LACKING
            assert held.under_way
            shown = group[0].shown
            # Another placement than the first, and one in which rank 0 has slots to fill.
            group[2] = Rank(tmp_path / "e", 2, 3, tmp_path / "model", incarnation=1)
            said, holds = mine._registry.scan(""), mine._held.copy()
            assert mine.repair(View(3, (0, 2, 3), (0, 0, 1, 0))) == LACKING
            # When everybody is back, so is the first placement: its next life loads what it lacks.
            with pytest.raises(RepairFailed, match="still read"):
                mine.repair(View(4, (0, 1, 2, 3), (0, 0, 1, 0)))
            assert group[0].shown is shown
            assert mine._registry.scan("") == said
            assert (mine._held == holds).all()
        finally:
            held.let_go()
        monkeypatch.setattr(mine, "_repair_within", 120.0)
        enter(group, View(5, (0, 1, 2, 3), (0, 0, 1, 0)))


def test_a_repair_waits_for_whoever_still_reads_for_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(1, (0, 1, 2, 3), (0,) * RANKS)
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model")) as group:
        enter(group, view)
        held = Held(monkeypatch)
        group[2].close()
        smaller = view.without([2])
        monkeypatch.setattr(group[0].coverage, "_repair_within", 0.1)
        try:
            assert group[0].coverage.repair(smaller) == LACKING
            monkeypatch.setattr(group[0].coverage, "_repair_within", 60.0)
            group[2] = Rank(tmp_path / "e", 2, 3, tmp_path / "model", incarnation=1)
            with ThreadPoolExecutor() as together:
                later = together.submit(group[0].coverage.repair, View(3, (0, 1, 2, 3), (0, 0, 1, 0)))
                time.sleep(0.5)
                assert not later.done()
                held.let_go()
                assert later.result()
        finally:
            held.let_go()
        group[0].check()
