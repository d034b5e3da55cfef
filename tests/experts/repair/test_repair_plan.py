"""The repair planner: cheapest tier first, spread within a tier, hazards seen, explained."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import Placement, count_moves, plan_placement
from eep.experts.repair.repair_plan import BackupContents, Origin, Tier, plan_repair

MIB = 1 << 20


def placement(*rows: list[int], slots: int = 2) -> Placement:
    table = np.array(rows)
    return Placement(table, int(table.max()) + 1, slots)


def everything(layers: int, experts: int, host: int = 0) -> BackupContents:
    return BackupContents(host, np.ones((layers, experts), dtype=bool))


def test_each_tier_is_used_when_no_cheaper_one_is_there() -> None:
    before = placement([0, EMPTY, 1, 2, 3, 4])
    # Rank 2 is gone with experts 3 and 4; expert 0 moves within rank 0 and is copied to rank 1.
    after = placement([3, 0, 0, 2, EMPTY, EMPTY])
    after = Placement(after.physical_to_logical.copy(), 5, 2)
    held = np.zeros((1, 5), dtype=bool)
    held[0, 3] = True
    result = plan_repair(before, after, [0, 1], [0, 0, 0], MIB, backups={"b": BackupContents(0, held)}, disk=True)
    tiers = {(t.expert, t.rank): [o.tier for o in t.origins] for t in result.transfers}
    assert tiers == {
        (3, 0): [Tier.DRAM, Tier.DISK],
        (0, 0): [Tier.LOCAL, Tier.DISK],
        (0, 1): [Tier.PEER, Tier.DISK],
    }
    assert {t.expert for t in result.transfers if t.staged} == {0}, "its only slot is about to be overwritten"


def test_a_copy_that_stays_is_preferred_over_one_that_goes() -> None:
    before = placement([0, 1, 0, 2])
    after = placement([1, 1, 0, 0])
    after = Placement(after.physical_to_logical.copy(), 3, 2)
    result = plan_repair(before, after, [0, 1], [0, 0], MIB)
    assert [(t.expert, t.staged, t.origins) for t in result.transfers] == [
        (1, False, (Origin(Tier.LOCAL, 0, 1),)),
        (0, False, (Origin(Tier.LOCAL, 1, 0),)),
    ]


def test_work_is_spread_over_equal_sources() -> None:
    experts = 8
    empty = Placement(np.full((4, experts), EMPTY), experts, experts)
    full = Placement(np.tile(np.arange(experts), (4, 1)), experts, experts)
    backups = {name: everything(4, experts) for name in ("a", "b", "c", "d")}
    result = plan_repair(empty, full, [0], [0], MIB, backups=backups)
    first = Counter(t.origins[0].backup for t in result.transfers)
    assert first == {"a": 8, "b": 8, "c": 8, "d": 8}
    assert all({o.backup for o in t.origins} == set(backups) for t in result.transfers)


def test_all_that_this_host_has_comes_before_what_others_have() -> None:
    # Rank 0 lacks expert 0, which ranks 1 (on its host) and 2 (on another) have.
    before, after = placement([EMPTY, 0, 0], slots=1), placement([0, 0, 0], slots=1)
    backups = {"near": everything(1, 1, host=3), "far": everything(1, 1, host=4)}
    (found,) = plan_repair(before, after, [0, 1, 2], [3, 3, 4], MIB, backups=backups, disk=True).transfers
    assert [str(origin) for origin in found.origins] == [
        *("rank 1 slot 0", "backup near", "rank 2 slot 0 of another host", "backup far of another host", "disk")
    ]


def test_a_rank_is_not_asked_by_one_host_for_more_than_its_peers_are() -> None:
    """Ranks of two hosts lack the same expert, which two ranks of a third host have: each is read from once."""
    before, after = placement([EMPTY, EMPTY, 0, 0], slots=1), placement([0, 0, 0, 0], slots=1)
    found = plan_repair(before, after, range(4), [0, 1, 2, 2], MIB).transfers
    assert sorted(transfer.origins[0].rank for transfer in found) == [2, 3]


def test_slots_of_others_that_cannot_be_read_are_no_sources() -> None:
    """Rank 0 has expert 0 in a slot that only it can read, and rank 1 expert 1 in one that all can."""
    before = placement([1, 0, EMPTY, EMPTY, 1, EMPTY])
    after = placement([1, 0, 0, 1, 1, 0])
    plan = plan_repair(before, after, [0, 1, 2], [0, 0, 0], MIB, disk=True, readable=1)
    found = {(each.rank, each.slot): [str(origin) for origin in each.origins] for each in plan.transfers}
    assert found[1, 0] == found[2, 1] == ["disk"]
    assert found[1, 1][-1] == "disk"
    assert set(found[1, 1][:-1]) == {"rank 0 slot 0", "rank 2 slot 0"}
    own, _ = plan_repair(placement([1, 0]), placement([0, 1]), [0], [0], MIB, readable=0).transfers
    assert [str(origin) for origin in own.origins] == ["its own slot 1"]


def test_explain_says_what_moves_from_where() -> None:
    before = placement([0, 1, 2, 3])
    after = Placement(np.array([[0, 3, EMPTY, EMPTY]]), 4, 2)
    lost = plan_repair(before, after, [0], [0, 0], 3 * MIB)
    assert "1 have no source" in lost.explain()
    assert lost.unreachable
    found = plan_repair(before, after, [0], [0, 0], 3 * MIB, backups={"b0": everything(1, 4)}, disk=True)
    text = found.explain()
    assert "1 experts to move, 3.0 MiB in all" in text
    assert "layer 0 expert 3 -> rank 0 slot 1 from backup b0, else disk" in text
    assert found.bytes_by_tier() == {**dict.fromkeys(Tier, 0), Tier.DRAM: 3 * MIB}
    assert "and 1 more" in found.explain(most=0)


def test_placements_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="different shapes"):
        plan_repair(placement([0, 1]), placement([0, 1, 0, 1]), [0], [0, 0], MIB)


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(0, 4) | st.just(float("inf")))
def test_every_slot_that_changes_has_sources_that_hold_its_expert(seed: int, extra: float) -> None:
    rng = np.random.default_rng(seed)
    ranks, slots, experts = 5, 4, 12
    start = plan_placement(rng.lognormal(0, 1, (3, experts)), None, range(ranks), slots, [0, 0, 1, 1, 1])
    active = sorted(rng.choice(ranks, size=3 + seed % 3, replace=False).tolist())
    after = plan_placement(rng.lognormal(0, 1, (3, experts)), start, active, slots, [0, 0, 1, 1, 1], extra_moves=extra)
    result = plan_repair(start, after, active, [0, 0, 1, 1, 1], 1, backups={"b": everything(3, experts)})
    assert len(result.transfers) == count_moves(start.on(active), after)
    assert not result.unreachable
    written = {(t.layer, t.rank, t.slot) for t in result.transfers}
    for t in result.transfers:
        assert after.physical_to_logical[t.layer, t.rank * slots + t.slot] == t.expert
        assert [o.tier for o in t.origins] == sorted(o.tier for o in t.origins)
        for origin in t.origins:
            if origin.tier in (Tier.LOCAL, Tier.PEER, Tier.FAR_PEER):
                assert origin.rank in active
                assert (origin.tier is Tier.LOCAL) == (origin.rank == t.rank)
                assert start.physical_to_logical[t.layer, origin.rank * slots + origin.slot] == t.expert
                assert t.staged or (t.layer, origin.rank, origin.slot) not in written
