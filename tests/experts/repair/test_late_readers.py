"""A reader that outlives its repair still writes into slots: nothing is verified there before it has ended."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eep.experts import slot_filler
from eep.experts.coverage import LACKING, Coverage
from eep.experts.repair import executor
from eep.experts.repair.executor import RepairFailed
from eep.long_work import wait_in_parts
from eep.view import View
from tests.experts import model
from tests.experts.covered import PATIENCE_S, RANKS, HeldReads, Rank, enter, ranks

WHOLE = View(1, (0, 1, 2, 3), (0,) * RANKS)


def repair_within(mine: Coverage, seconds: float) -> None:
    mine._policy = replace(mine._policy, repair_within=seconds)


def time_out_while_reading(mine: Coverage, held: HeldReads, view: View) -> None:
    """A repair whose time is over when a read of the checkpoint is under way, and no sooner."""

    def none_done(futures: Collection[Future[Any]], *_: Any) -> tuple[set[Future[Any]], set[Future[Any]]]:
        held.wait_until_begun()
        return set(), set(futures)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "wait_in_parts", none_done)
        assert mine.repair(view) == LACKING
    assert held.under_way


def test_a_late_read_does_not_write_into_what_a_later_repair_has_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model")) as group:
        enter(group, WHOLE)
        held, mine = HeldReads(monkeypatch), group[0].coverage
        group[2].close()
        try:
            time_out_while_reading(mine, held, WHOLE.without([2]))
            repair_within(mine, 0.0)
            shown = group[0].shown
            # Another placement than the first, and one in which rank 0 has slots to fill.
            group[2] = Rank(tmp_path / "e", 2, 3, tmp_path / "model", incarnation=1)
            said, holds = mine.registry.scan(""), mine._slots.table.copy()
            assert mine.repair(View(3, (0, 2, 3), (0, 0, 1, 0))) == LACKING
            # When all ranks are back, so is the first placement: its next life loads what it lacks.
            with pytest.raises(RepairFailed, match="still read"):
                mine.repair(View(4, (0, 1, 2, 3), (0, 0, 1, 0)))
            assert group[0].shown is shown
            assert mine.registry.scan("") == said
            assert (mine._slots.table == holds).all()
        finally:
            held.let_go()
        repair_within(mine, PATIENCE_S)
        enter(group, View(5, (0, 1, 2, 3), (0, 0, 1, 0)))


def test_a_repair_waits_for_the_late_reads_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    def noted(late: Collection[Future[Any]], within: float) -> Any:
        if late:
            waits.set()
        return wait_in_parts(late, within)

    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model")) as group:
        enter(group, WHOLE)
        held, mine = HeldReads(monkeypatch), group[0].coverage
        group[2].close()
        try:
            time_out_while_reading(mine, held, WHOLE.without([2]))
            group[2] = Rank(tmp_path / "e", 2, 3, tmp_path / "model", incarnation=1)
            monkeypatch.setattr(slot_filler, "wait_in_parts", noted)
            with ThreadPoolExecutor() as together:
                later = together.submit(mine.repair, View(3, (0, 1, 2, 3), (0, 0, 1, 0)))
                assert waits.wait(PATIENCE_S)
                assert not later.done()
                held.let_go()
                assert later.result()
        finally:
            held.let_go()
        group[0].check()
