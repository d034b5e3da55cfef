"""Repair between real processes over shared memory, with ranks killed and bytes damaged on the way."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from eep.experts.placement.slot_plan import Placement, plan_placement
from tests.experts import model
from tests.experts.ranks import Rank

LOAD = np.random.default_rng(1).lognormal(0, 1, (model.LAYERS, model.EXPERTS))

Start = Callable[..., Rank]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    started: list[Rank] = []

    def start(rank: int, slots: int, incarnation: int = 0) -> Rank:
        started.append(Rank(tmp_path, rank, slots, incarnation))
        return started[-1]

    yield start
    for rank in started:
        rank.end()


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> str:
    return str(model.save_checkpoint(tmp_path / "checkpoint"))


def table(placement: Placement) -> list[list[int]]:
    return placement.physical_to_logical.tolist()


def loaded(start: Start, placement: Placement, *numbers: int) -> dict[int, Rank]:
    ranks = {number: start(number, placement.slots_per_rank) for number in numbers}
    for rank in ranks.values():
        assert rank.hear() == {"ready": True}
        rank.ask("load", placement=table(placement))
    return ranks


@pytest.mark.parametrize(("copies", "tier"), [(1, "DISK"), (2, "PEER")])
def test_several_losses_in_a_row_down_to_one_rank(start: Start, checkpoint: str, copies: int, tier: str) -> None:
    size, topology = model.EXPERTS, [0] * 4
    placement = plan_placement(LOAD, None, range(4), size, topology, max_copies=copies)
    ranks = loaded(start, placement, 0, 1, 2, 3)
    addresses = {n: rank.ask("look", placement=table(placement))["address"] for n, rank in ranks.items()}
    tiers = set()
    for victim in (2, 0, 3):
        ranks.pop(victim).kill()
        after = plan_placement(LOAD, placement, ranks, size, topology, max_copies=copies)
        for rank in ranks.values():
            rank.tell(
                "repair",
                before=table(placement),
                after=table(after),
                active=list(ranks),
                incarnations=[0] * 4,
                disk=checkpoint,
            )
        for number, rank in ranks.items():
            result = rank.hear()
            assert not result["setbacks"]
            tiers |= set(result["moved"])
            assert rank.ask("look", placement=table(after)) == {"wrong": [], "address": addresses[number]}
        placement = after
    assert not placement.degraded
    assert tiers == {tier}, "what has another copy comes from its rank, what has none from disk"


@pytest.fixture
def joiner(start: Start) -> Callable[[], tuple[dict[int, Rank], Placement, Placement]]:
    """Ranks 0 and 1 hold everything, rank 2 is empty and is to hold everything too."""

    def make() -> tuple[dict[int, Rank], Placement, Placement]:
        size = model.EXPERTS
        before = Placement(
            np.tile(np.r_[np.arange(size), np.arange(size), np.full(size, -1)], (model.LAYERS, 1)), size, size
        )
        after = plan_placement(LOAD, before, range(3), size, [0] * 3)
        ranks = loaded(start, before, 0, 1)
        ranks |= loaded(start, before, 2)
        return ranks, before, after

    return make


def test_a_source_killed_in_the_middle_is_replaced_by_another_rank(
    joiner: Callable[[], tuple[dict[int, Rank], Placement, Placement]],
) -> None:
    ranks, before, after = joiner()
    reader = ranks[2]
    reader.tell("repair", before=table(before), after=table(after), active=[0, 1, 2], incarnations=[0] * 3, pause=True)
    killed = False
    while "pause" in (said := reader.hear()):
        if not killed:
            ranks[0].kill()
            killed = True
        reader.tell("go")
    assert said["moved"] == {"PEER": model.LAYERS * model.EXPERTS}
    assert len(said["setbacks"]) == model.LAYERS * model.EXPERTS // 2, "the half planned from the dead rank"
    assert all("rank 0" in setback for setback in said["setbacks"])
    assert reader.ask("look", placement=table(after))["wrong"] == []


def test_when_all_ranks_that_hold_it_die_the_disk_takes_over(
    joiner: Callable[[], tuple[dict[int, Rank], Placement, Placement]], checkpoint: str
) -> None:
    ranks, before, after = joiner()
    ranks[0].kill()
    reader = ranks[2]
    reader.tell(
        "repair",
        before=table(before),
        after=table(after),
        active=[0, 1, 2],
        incarnations=[0] * 3,
        disk=checkpoint,
        pause=True,
    )
    while "pause" in (said := reader.hear()):
        if "rank 1" in said["pause"]:
            ranks[1].end()
        reader.tell("go")
    assert said["moved"] == {"DISK": model.LAYERS * model.EXPERTS}
    assert reader.ask("look", placement=table(after))["wrong"] == []


def test_a_flipped_bit_is_caught_and_the_expert_comes_from_elsewhere(
    joiner: Callable[[], tuple[dict[int, Rank], Placement, Placement]],
) -> None:
    ranks, before, after = joiner()
    for layer in range(model.LAYERS):
        for slot in range(model.EXPERTS):
            ranks[1].ask("flip", layer=layer, slot=slot, bit=1009 * layer + 31 * slot)
    said = ranks[2].ask("repair", before=table(before), after=table(after), active=[0, 1, 2], incarnations=[0] * 3)
    assert said["moved"] == {"PEER": model.LAYERS * model.EXPERTS}
    assert len(said["setbacks"]) == model.LAYERS * model.EXPERTS // 2
    assert all("rank 1" in setback and "wrong checksum" in setback for setback in said["setbacks"])
    assert ranks[2].ask("look", placement=table(after))["wrong"] == []


def test_an_expert_that_is_damaged_everywhere_is_reported_not_served(
    joiner: Callable[[], tuple[dict[int, Rank], Placement, Placement]],
) -> None:
    ranks, before, after = joiner()
    for rank in (0, 1):
        ranks[rank].ask("flip", layer=1, slot=5, bit=7)
    said = ranks[2].ask("repair", before=table(before), after=table(after), active=[0, 1, 2], incarnations=[0] * 3)
    assert "no source delivered 1 experts, among them expert 5 of layer 1" in said["failed"]


EXCHANGED = (
    Placement(np.tile(np.arange(8), (model.LAYERS, 1)), 8, 4),
    Placement(np.tile([4, 5, 2, 3, 0, 1, 6, 7], (model.LAYERS, 1)), 8, 4),
)
"""Before and after: two ranks exchange two experts of each layer. There are no other copies in memory."""


def test_ranks_that_exchange_experts_do_not_wait_for_each_other(start: Start, checkpoint: str) -> None:
    """Each reads what it can of the other before that is overwritten; what comes too late comes from disk."""
    before, after = EXCHANGED
    ranks = loaded(start, before, 0, 1)
    order = {"before": table(before), "after": table(after), "active": [0, 1], "incarnations": [0, 0]}
    for rank in ranks.values():
        rank.tell("repair", **order, disk=checkpoint)
    for rank in ranks.values():
        said = rank.hear()
        assert sum(said["moved"].values()) == 2 * model.LAYERS
        assert all("wrong checksum" in setback for setback in said["setbacks"])
        assert rank.ask("look", placement=table(after))["wrong"] == []


def test_a_rank_that_comes_too_late_to_an_exchange_reads_the_next_source(start: Start, checkpoint: str) -> None:
    before, after = EXCHANGED
    ranks = loaded(start, before, 0, 1)
    order = {"before": table(before), "after": table(after), "active": [0, 1], "incarnations": [0, 0]}
    assert ranks[0].ask("repair", **order) == {"moved": {"PEER": 2 * model.LAYERS}, "setbacks": []}
    said = ranks[1].ask("repair", **order)
    assert f"no source delivered {2 * model.LAYERS} experts" in said["failed"]
    assert ranks[1].ask("look", placement=table(before))["wrong"] == [], "staged: nothing was written"
    said = ranks[1].ask("repair", **order, disk=checkpoint)
    assert said["moved"] == {"DISK": 2 * model.LAYERS}
    assert len(said["setbacks"]) == 2 * model.LAYERS
    assert all("wrong checksum" in setback for setback in said["setbacks"])
    for rank in ranks.values():
        assert rank.ask("look", placement=table(after))["wrong"] == []


def test_a_relaunched_rank_is_read_under_its_new_incarnation_only(
    joiner: Callable[[], tuple[dict[int, Rank], Placement, Placement]], start: Start
) -> None:
    ranks, before, after = joiner()
    ranks[1].kill()
    fresh = start(1, model.EXPERTS, incarnation=1)
    assert fresh.hear() == {"ready": True}
    said = ranks[2].ask("repair", before=table(before), after=table(after), active=[0, 1, 2], incarnations=[0, 1, 0])
    # The new process holds nothing yet: its zeros are not taken for experts.
    assert said["moved"] == {"PEER": model.LAYERS * model.EXPERTS}
    assert all("wrong checksum" in setback for setback in said["setbacks"])
    assert ranks[2].ask("look", placement=table(after))["wrong"] == []
