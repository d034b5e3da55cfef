"""The log of placements: whoever comes first decides, and every rank of an epoch finds the same."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from eep.errors import EepError
from eep.experts.balancing.placement_log import BaseRecord, LogName, PlacementLog
from eep.experts.placement.slot_plan import Placement


def record(doses: int) -> BaseRecord:
    table = np.roll(np.arange(4), doses)[None]
    return BaseRecord.of(Placement(table, 4, 2), np.arange(4.0)[None] + doses, doses)


@pytest.fixture
def log(tmp_path: Path) -> PlacementLog:
    return PlacementLog(tmp_path / "log")


def test_a_record_gives_back_what_it_was_made_of() -> None:
    kept = record(1)
    assert kept.placement.physical_to_logical.tolist() == [[3, 0, 1, 2]]
    assert kept.demand.tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_an_epoch_begins_with_what_the_last_one_ended_with(log: PlacementLog, tmp_path: Path) -> None:
    assert log.enter(3, record(0)).doses == 0
    log.propose(LogName(3, 1), 0, record(1))
    assert log.enter(4, record(9)).doses == 0, "a proposal does not count"
    log.propose(LogName(4, 1), 0, record(2))
    log.commit(LogName(4, 1), 0)
    assert PlacementLog(tmp_path / "log").enter(5, record(9)).doses == 2


def test_who_comes_late_finds_what_was_decided(log: PlacementLog) -> None:
    """A rank enters the next epoch while another still switches in the last."""
    log.enter(3, record(0))
    log.propose(LogName(3, 1), 0, record(1))
    assert log.enter(4, record(0)).doses == 0
    log.commit(LogName(3, 1), 0)
    assert log.enter(4, record(0)).doses == 0
    assert log.enter(5, record(0)).doses == 0, "what was overtaken never counts"


def test_the_last_attempt_is_the_proposal(log: PlacementLog) -> None:
    assert log.newest_proposal(LogName(3, 1)) is None
    log.propose(LogName(3, 1), 0, record(1))
    log.propose(LogName(3, 1), 1, record(2))
    log.propose(LogName(3, 1), 1, record(3))
    found = log.newest_proposal(LogName(3, 1))
    assert found is not None
    assert (found[0], found[1].doses) == (1, 2)
    assert log.newest_proposal(LogName(3, 2)) is None


def test_two_ranks_commit_the_same(log: PlacementLog) -> None:
    log.enter(3, record(0))
    log.propose(LogName(3, 1), 0, record(1))
    log.commit(LogName(3, 1), 0)
    log.commit(LogName(3, 1), 0)
    assert log.enter(4, record(0)).doses == 1


def test_the_log_does_not_grow(log: PlacementLog, tmp_path: Path) -> None:
    for epoch in range(20):
        log.enter(epoch, record(0))
        log.propose(LogName(epoch, 1), 0, record(epoch))
        log.commit(LogName(epoch, 1), 0)
    assert len(os.listdir(tmp_path / "log")) <= 8


def test_a_torn_record_is_an_error_that_names_it(log: PlacementLog, tmp_path: Path) -> None:
    log.enter(3, record(0))
    (tmp_path / "log" / str(LogName(3, 0))).write_bytes(b"?")
    with pytest.raises(EepError, match="cannot be read"):
        log.enter(3, record(0))


def test_a_file_system_without_hard_links_is_named(log: PlacementLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(EepError, match="hard links"):
        log.enter(3, record(0))
