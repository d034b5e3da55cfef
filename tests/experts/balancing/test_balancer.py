"""Ranks whose experts move while they serve: the bytes are right, and ranks that are lost meanwhile find what counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eep import faults
from eep.errors import EepError
from eep.experts.balancing.balance_record import read_balance
from eep.experts.balancing.balancer import Balancer
from eep.experts.balancing.leader import BalancePolicy
from eep.experts.balancing.switch_turn import NOTHING
from eep.experts.placement.margin import find_margin
from eep.experts.placement.packing import EMPTY, IntArray
from eep.view import View
from tests.experts import model
from tests.experts.covered import RANKS, Rank, enter

ALL = tuple(range(RANKS))
SLOTS, STAGED, EVERY = 3, 4, 10
SHAPE = (model.LAYERS, model.EXPERTS)


class Fleet:
    """Ranks that count what a test says, and step when it says."""

    def __init__(self, path: Path, disk: Path, slots: int = SLOTS, least_copies: int = 1) -> None:
        self.path, self.disk, self.slots, self.least_copies = path, disk, slots, least_copies
        self.group = {rank: self._rank(rank, 0) for rank in ALL}
        self.counts: IntArray = np.zeros(SHAPE, dtype=np.int64)
        self.balancers = {rank: self._balancer(rank, 0) for rank in ALL}

    def _rank(self, rank: int, incarnation: int, last: Rank | None = None) -> Rank:
        return Rank(
            self.path / "e",
            rank,
            self.slots,
            self.disk,
            incarnation,
            last=last,
            staged=STAGED,
            least_copies=self.least_copies,
        )

    def _balancer(self, rank: int, incarnation: int) -> Balancer:
        return Balancer(
            (rank, incarnation), self.group[rank].coverage, lambda: self.counts.copy(), BalancePolicy(EVERY)
        )

    def enter(self, view: View) -> None:
        self.view = view
        enter(self.group, view)

    def replace(self, rank: int, incarnation: int, last: Rank | None = None) -> None:
        self.group[rank] = self._rank(rank, incarnation, last)
        self.balancers[rank] = self._balancer(rank, incarnation)

    def ask_for(self, *hot: int, times: int = 4000) -> None:
        """Gates pick these experts, and others a little. All ranks step and look twice, as they do in a running server."""
        for _ in range(2):
            for balancer in self.active():
                for _ in range(EVERY):
                    balancer.stepped()
            self.look()
            self.counts += times // 100
            self.counts[:, list(hot)] += times

    def look(self) -> None:
        for balancer in [*self.active()[1:], self.active()[0], *self.active()]:
            balancer.look()

    def active(self) -> list[Balancer]:
        return [self.balancers[rank] for rank in self.view.active]

    def words(self) -> set[int]:
        return {balancer.word() for balancer in self.active()}

    def switch(self, *ranks: int) -> None:
        (word,) = self.words()
        assert word != NOTHING
        for rank in ranks or self.view.active:
            self.balancers[rank].switch(word)
            self.group[rank].check()

    def digests(self) -> set[str]:
        shown = [self.group[rank].shown for rank in self.view.active]
        return {each.digest for each in shown if each is not None}

    def close(self) -> None:
        for rank in self.group.values():
            rank.coverage.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, model.save_checkpoint(tmp_path / "model"))
    made.enter(View(1, ALL, (0,) * RANKS))
    yield made
    made.close()


def stage(fleet: Fleet) -> None:
    """Until all have staged moves, since the experts that the first rank has at the start are hot."""
    for _ in range(2):
        stage_more(fleet)
    assert fleet.words() != {NOTHING}


def stage_more(fleet: Fleet) -> None:
    fleet.ask_for(*fleet.group[0].first.physical_to_logical[0, :SLOTS].tolist())


def test_experts_move_and_the_busiest_rank_is_less_busy(fleet: Fleet, tmp_path: Path) -> None:
    (before,) = fleet.digests()
    assert fleet.words() == {NOTHING}
    stage(fleet)
    assert fleet.digests() == {before}, "what is staged does not count yet"
    fleet.switch()
    assert len(fleet.digests()) == 1
    assert fleet.digests() != {before}
    assert fleet.words() == {NOTHING}
    uneven = read_balance(tmp_path / "e", 1)
    assert uneven is not None
    for _ in range(6):
        stage_more(fleet)
        if fleet.words() != {NOTHING}:
            fleet.switch()
    even = read_balance(tmp_path / "e", 1)
    assert even is not None
    assert even["doses"] >= 1
    assert even["balancedness"] > uneven["balancedness"] + 0.05


def test_nothing_moves_where_all_experts_are_asked_for_alike(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.ask_for()
    assert fleet.words() == {NOTHING}


def test_a_lost_rank_and_its_next_life_find_what_was_moved(fleet: Fleet) -> None:
    stage(fleet)
    fleet.switch()
    (moved,) = fleet.digests()
    fleet.enter(View(2, (0, 1, 3), (0,) * RANKS))
    old = fleet.group[2]
    old.coverage.close()
    fleet.replace(2, 1)
    fleet.enter(View(3, ALL, (0, 0, 1, 0)))
    assert fleet.digests() == {moved}
    assert old.shown is not None


def test_moves_among_unequal_ranks_stay_when_the_lost_one_is_back(fleet: Fleet) -> None:
    fleet.group[2].coverage.close()
    fleet.enter(View(2, (0, 1, 3), (0,) * RANKS))
    stage(fleet)
    fleet.switch()
    held = {rank: model.held(fleet.group[rank].shown, rank).copy() for rank in (0, 1, 3)}  # type: ignore[arg-type]
    fleet.replace(2, 1)
    fleet.enter(View(3, ALL, (0, 0, 1, 0)))
    shown = fleet.group[0].shown
    assert shown is not None
    for rank in (0, 1, 3):
        assert (model.held(shown, rank) == held[rank]).all(), "the return of a rank moves nothing"


@pytest.mark.parametrize("switched", [(0,), (3,), (0, 1, 2)])
def test_a_loss_when_some_ranks_have_switched(fleet: Fleet, switched: tuple[int, ...]) -> None:
    (before,) = fleet.digests()
    stage(fleet)
    fleet.switch(*switched)
    fleet.enter(View(2, ALL, (0,) * RANKS))
    assert len(fleet.digests()) == 1
    assert fleet.digests() != {before}, "the first one to switch has noted it"


def test_a_loss_when_all_have_agreed_and_none_has_switched(fleet: Fleet) -> None:
    (before,) = fleet.digests()
    stage(fleet)
    stale = fleet.balancers[1]._staged
    assert stale is not None
    fleet.enter(View(2, ALL, (0,) * RANKS))
    assert fleet.digests() == {before}
    with pytest.raises(EepError, match="another placement than the one in force"):
        fleet.group[1].coverage.switch(stale)
    fleet.group[1].check()
    assert fleet.words() == {NOTHING}


def test_a_rank_killed_between_its_writes_holds_nothing_there(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(fleet)
    staged = fleet.balancers[0]._staged
    assert staged is not None
    moved = staged.transfers

    def die(point: str) -> None:
        if point == "balance.written":
            raise ZeroDivisionError

    monkeypatch.setattr(faults, "at", die)
    with pytest.raises(ZeroDivisionError):
        fleet.switch(0)
    monkeypatch.undo()
    held, _ = fleet.group[0].index.verify(fleet.group[0].memory, model.EXPERTS)
    assert moved
    assert all(held[transfer.layer, transfer.slot] == EMPTY for transfer in moved)
    fleet.group[0].coverage.close()
    fleet.replace(0, 1, last=fleet.group[0])
    fleet.enter(View(2, ALL, (1, 0, 0, 0)))


def test_a_spoiled_copy_is_not_staged(fleet: Fleet) -> None:
    """Every peer's memory is wrong, so the checkpoint is read."""
    first = fleet.group[0].shown
    assert first is not None
    for rank in ALL:
        fleet.group[rank].memory.region.bitwise_not_()
    stage(fleet)
    for rank in ALL:
        fleet.group[rank].memory.region.bitwise_not_()
    fleet.switch()


def test_the_log_of_a_full_disk_does_not_part_the_ranks(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have agreed, so all switch. The next view finds what was noted last."""
    (before,) = fleet.digests()
    stage(fleet)
    log = type(fleet.balancers[0]._log)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "commit", full)
    fleet.switch()
    assert len(fleet.digests()) == 1
    assert fleet.digests() != {before}
    fleet.enter(View(2, ALL, (0,) * RANKS))
    assert fleet.digests() == {before}


def test_without_room_beside_the_slots_nothing_can_move(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "e", 0, SLOTS, None)
    with pytest.raises(EepError, match="no room to stage"):
        Balancer((0, 0), rank.coverage, lambda: np.zeros(SHAPE, dtype=np.int64), BalancePolicy())
    rank.close()


def test_copies_for_a_loss_stay_while_hot_experts_move(tmp_path: Path) -> None:
    """Sixteen slots for eight experts: any one rank may go, before and after."""
    fleet = Fleet(tmp_path, model.save_checkpoint(tmp_path / "model"), slots=4, least_copies=2)
    try:
        fleet.enter(View(1, ALL, (0,) * RANKS))
        hot = fleet.group[0].first.physical_to_logical[0, :4].tolist()
        load = np.full(SHAPE, 40.0)
        load[:, hot] += 4000
        before = fleet.group[0].routed
        for _ in range(6):
            fleet.ask_for(*hot)
            if fleet.words() != {NOTHING}:
                fleet.switch()
        after, shown = fleet.group[0].routed, fleet.group[0].shown
        assert before is not None
        assert after is not None
        assert shown is not None
        assert after.imbalance(load).mean() < before.imbalance(load).mean() - 0.05
        assert find_margin(shown, ALL, [0] * RANKS).any_ranks == 1
        for lost in ALL:
            left = tuple(rank for rank in ALL if rank != lost)
            held = {rank: fleet.group[rank].coverage.brought_in.total() for rank in ALL}
            fleet.enter(View(fleet.view.epoch + 1, left, (0,) * RANKS))
            assert {rank: fleet.group[rank].coverage.brought_in.total() for rank in ALL} == held
            fleet.enter(View(fleet.view.epoch + 1, ALL, (0,) * RANKS))
    finally:
        fleet.close()
