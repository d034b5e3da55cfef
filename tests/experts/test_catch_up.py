"""With ``mask_after`` a view begins without what a slow source has. It comes in behind the steps, until all is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from eep.errors import EepError
from eep.experts import arrivals, catch_up
from eep.experts.catch_up import in_order, split
from eep.experts.catch_up_turns import CatchUpTurns
from eep.experts.checkpoint.checkpoint_reader import CheckpointReader
from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import Placement
from eep.experts.repair.reader import SourceLost, Want
from eep.experts.repair.repair_plan import Origin, RepairPlan, Tier, Transfer
from eep.view import View
from tests.experts import model
from tests.experts.covered import PATIENCE_S, RANKS, HeldReads, Rank, counts_of, enter, ranks

WHOLE = View(1, (0, 1, 2, 3), (0,) * RANKS)
Group = dict[int, Rank]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """Three slots each: three ranks can hold the eight experts, and what only the fourth had is on disk."""
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model"), "mask", mask_after=0.0) as made:
        enter(made, WHOLE)
        yield made


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def tell(group: Group, view: View) -> None:
    """All ranks hear what has arrived, and serve it."""
    heard = {rank: group[rank].coverage.arrived() for rank in view.active}
    for rank in view.active:
        group[rank].coverage.serve_arrived(heard)
        group[rank].check()
    assert len({group[rank].shown.digest for rank in view.active}) == 1  # type: ignore[union-attr]


def lacking(group: Group, view: View) -> int:
    return sum(group[rank].coverage.partly.lacks for rank in view.active)  # type: ignore[union-attr]


def masked(group: Group) -> int:
    shown = group[0].shown
    assert shown is not None
    return int(shown.masked.sum())


def test_a_view_begins_at_once_and_is_whole_when_all_has_arrived(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldReads(monkeypatch)
    group[2].close()
    less = WHOLE.without([2])
    enter(group, less, masked=True)
    assert all(group[rank].coverage.is_behind for rank in less.active)
    before = masked(group)
    tell(group, less)
    assert masked(group) == before, "nothing has arrived"
    held.let_go()
    until(lambda: not lacking(group, less))
    assert masked(group) == before, "what has arrived is not served before all ranks know it"
    tell(group, less)
    assert masked(group) == 0
    assert not any(group[rank].coverage.is_behind for rank in less.active)
    assert group[0].coverage.brought_in[Tier.DISK]


def test_experts_are_served_as_they_arrive(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "_AT_ONCE", 1)
    held = HeldReads(monkeypatch)
    group[2].close()
    less = WHOLE.without([2])
    enter(group, less, masked=True)
    left = masked(group)
    while left:
        held.let_some_go(1)
        arrived = {rank: group[rank].coverage.arrived() for rank in less.active}
        until(lambda: {rank: group[rank].coverage.arrived() for rank in less.active} != arrived)  # noqa: B023
        tell(group, less)
        assert left - RANKS < masked(group) <= left, "one by one"
        left = masked(group)
    held.let_go()
    until(lambda: not lacking(group, less))
    tell(group, less)
    assert not group[0].coverage.is_behind


def test_what_peers_have_is_not_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has every expert: no read of the disk is needed, and none is waited for."""
    with ranks(tmp_path, 8, model.save_checkpoint(tmp_path / "model"), "mask", mask_after=0.0) as group:
        enter(group, WHOLE)
        held = HeldReads(monkeypatch)
        group[2].close()
        enter(group, WHOLE.without([2]))
        assert not group[0].coverage.is_behind
        held.let_go()


def test_a_source_that_is_fast_enough_is_waited_for(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model"), "mask", mask_after=PATIENCE_S) as group:
        enter(group, WHOLE)
        group[2].close()
        enter(group, WHOLE.without([2]))
        assert not group[0].coverage.is_behind


def test_another_loss_does_not_wait_for_a_read_that_is_stuck(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the slot that is read into gets what it is to hold then, when the read is over."""
    held = HeldReads(monkeypatch)
    group[2].close()
    enter(group, WHOLE.without([2]), masked=True)
    held.wait_until_begun()
    group[1].close()
    two = View(3, (0, 3), (0,) * RANKS)
    enter(group, two, masked=True)
    for rank, life in ((1, 1), (2, 1)):
        group[rank] = Rank(
            *(tmp_path / "e", rank, 3, tmp_path / "model", life, "mask", counts_of(rank)), mask_after=0.0
        )
    back = View(4, (0, 1, 2, 3), (0, 1, 1, 0))
    # A slot into which is read still is empty, whatever the view. What it lacks, another rank has.
    enter(group, back)
    held.let_go()
    until(lambda: not lacking(group, back))
    tell(group, back)
    assert not group[0].coverage.is_behind
    assert group[0].shown is not None
    assert group[0].shown.digest == group[0].first.digest


def test_a_life_that_ends_half_way_holds_nothing_where_it_was_reading(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "_AT_ONCE", 1)
    held = HeldReads(monkeypatch)
    group[2].close()
    less = WHOLE.without([2])
    enter(group, less, masked=True)
    held.wait_until_begun()
    for rank in less.active:
        noted, _ = group[rank].index.verify(group[rank].memory, model.EXPERTS)
        shown = model.held(group[rank].shown, rank)  # type: ignore[arg-type]
        assert (noted[shown != EMPTY] == shown[shown != EMPTY]).all()
        assert (noted == EMPTY).sum() <= (shown == EMPTY).sum()
    held.let_go()
    until(lambda: not lacking(group, less))


def test_a_source_that_fails_is_asked_again(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "_TRIES_EVERY_S", 0.01)
    read, is_broken = CheckpointReader.read, True

    def sometimes(reader: CheckpointReader, wants: Sequence[Want]) -> None:
        if is_broken:
            raise SourceLost("the disk is not there")
        read(reader, wants)

    monkeypatch.setattr(CheckpointReader, "read", sometimes)
    group[2].close()
    less = WHOLE.without([2])
    enter(group, less, masked=True)
    time.sleep(0.1)
    assert lacking(group, less)
    is_broken = False
    until(lambda: not lacking(group, less))
    tell(group, less)
    assert masked(group) == 0


def test_a_peer_that_is_gone_is_not_waited_for(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 died as well, and never says what it holds: the view does not begin, and the next one comes."""
    held = HeldReads(monkeypatch)
    group[2].close()
    group[1].close()
    assert group[0].coverage.repair(WHOLE.without([2])) is None
    assert group[0].coverage.standing is None
    with pytest.raises(EepError, match="no placement is in force"):
        group[0].coverage.serve_arrived({})
    held.let_go()


def test_only_a_part_that_all_hold_is_served() -> None:
    after = Placement(np.array([[0, 1, 2, 3], [3, 2, EMPTY, 0]]), 4, 2)
    says = {0: np.array([[True, False], [True, True]]), 1: np.array([[True, True], [False, True]])}
    part = arrivals.part_of(after, {rank: arrivals.pack(held) for rank, held in says.items()})
    assert part.physical_to_logical.tolist() == [[0, EMPTY, 2, 3], [3, 2, EMPTY, 0]]
    assert np.argwhere(part.masked).tolist() == [[0, 1], [1, 1]]


def test_what_memory_has_comes_first_and_from_nowhere_else() -> None:
    peer, disk = Origin(Tier.PEER, 1, 0), Origin(Tier.DISK)
    both, slow, busy = (
        Transfer(0, 0, 0, 0, (peer, disk)),
        Transfer(0, 1, 0, 1, (disk,)),
        Transfer(0, 2, 0, 2, (peer, disk)),
    )
    fast, rest = split(RepairPlan((both, slow, busy), 8), frozenset({(0, 2)}))
    assert [(each.expert, each.origins) for each in fast.transfers] == [(0, (peer,))]
    assert rest.transfers == (slow, busy)


def test_what_is_asked_for_most_comes_first() -> None:
    transfers = tuple(Transfer(0, expert, 0, expert, ()) for expert in range(3))
    asked = np.array([[1.0, 5.0, 3.0]])
    assert [each.expert for each in in_order(transfers, asked)] == [1, 2, 0]


class FakeSession:
    def __init__(self) -> None:
        self.view, self.settled = WHOLE, 0

    def settle(self) -> None:
        self.settled += 1


class FakeExchange:
    def __init__(self, heard: dict[int, bytes]) -> None:
        self.heard, self.said = heard, 0

    def exchange(self, said: bytes, timeout: float) -> dict[int, bytes]:
        self.said += 1
        return self.heard


class FakeCoverage:
    def __init__(self) -> None:
        self.is_behind, self.served = True, 0

    def arrived(self) -> bytes:
        return b""

    def serve_arrived(self, heard: dict[int, bytes]) -> None:
        self.served += 1
        self.is_behind = False


def test_ranks_exchange_only_while_something_is_missing_and_serve_in_the_same_epoch() -> None:
    session, exchange, coverage = FakeSession(), FakeExchange({0: b""}), FakeCoverage()
    turns = CatchUpTurns(session, exchange, coverage, every=2)  # type: ignore[arg-type]
    for _ in range(2):
        turns.switch_if_agreed()
        assert turns.asking(lambda: "sizes", 1.0)() == "sizes"
    assert (exchange.said, coverage.served) == (1, 0)
    session.view = View(2, (0, 1), (0,) * RANKS)
    turns.switch_if_agreed()
    assert coverage.served == 0, "what was said in another epoch does not count"
    for _ in range(2):
        turns.asking(lambda: "sizes", 1.0)()
    turns.switch_if_agreed()
    assert coverage.served == 1
    for _ in range(4):
        turns.switch_if_agreed()
        turns.asking(lambda: "sizes", 1.0)()
    assert (exchange.said, coverage.served) == (2, 1)
