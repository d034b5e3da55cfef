"""Coverage: who is lost and who comes back decides where experts are, and every slot holds the right bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.view import View
from tests.experts import model
from tests.experts.covered import RANKS, Rank


@contextlib.contextmanager
def ranks(directory: Path, slots: int, disk: Path | None) -> Iterator[dict[int, Rank]]:
    group = {rank: Rank(directory / "e", rank, slots, disk) for rank in range(RANKS)}
    try:
        yield group
    finally:
        for rank in group.values():
            rank.close()


def enter(group: dict[int, Rank], view: View) -> None:
    digests = {rank: group[rank].coverage.repair(view) for rank in view.active}
    assert len(set(digests.values())) == 1
    assert None not in digests.values()
    for rank in view.active:
        group[rank].check()
        shown = group[rank].shown
        assert shown is not None
        assert (shown.on(view.active).replica_counts > 0).all()


@pytest.mark.parametrize("disk", [False, True])
def test_losses_one_by_one_and_everybody_back(tmp_path: Path, disk: bool) -> None:
    """With room for all experts on every rank nothing need be read from disk."""
    path = model.save_checkpoint(tmp_path / "model") if disk else None
    with ranks(tmp_path, 8, path) as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        first = group[0].shown
        for lost in (1, 3, 0):
            view = view.without([lost])
            group[lost].close()
            enter(group, view)
        for back in (0, 1, 3):
            group[back] = Rank(tmp_path / "e", back, 8, path, incarnation=1)
            view = view.joined_by({back: 1})
            enter(group, view)
        assert group[2].shown is not None
        assert first is not None
        assert group[2].shown.digest == first.digest, "when all are back, so is the first placement"


def test_what_only_the_dead_had_comes_from_disk(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model")) as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        group[2].close()
        enter(group, view.without([2]))


def test_too_few_slots_wait_for_a_rank_to_come_back(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, model.save_checkpoint(tmp_path / "model")) as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        group[2].close()
        less = view.without([2])
        assert {group[rank].coverage.repair(less) for rank in less.active} == {None}
        group[2] = Rank(tmp_path / "e", 2, 2, tmp_path / "model", incarnation=1)
        enter(group, less.joined_by({2: 1}))
