"""Routing tables: what kernels read equals the placement, at addresses that never change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eep.experts.placement.slot_plan import Placement, plan_placement
from eep.experts.routing_tables import RoutingTables


def addresses(tables: RoutingTables) -> list[int]:
    return [tensor.data_ptr() for tensor in vars(tables).values()]


def test_tables_follow_the_placement_in_place() -> None:
    load = np.random.default_rng(0).lognormal(0, 1, (3, 10))
    tables = RoutingTables(layers=3, experts=10, slots=16, max_copies=4)
    before = addresses(tables)
    placement = plan_placement(load, None, range(4), 4, [0] * 4, max_copies=4)
    for active in (range(4), range(3), [0, 2, 3], range(4)):
        placement = plan_placement(load, placement, active, 4, [0] * 4, max_copies=4)
        tables.publish(placement)
        assert addresses(tables) == before
        assert tables.physical_to_logical.numpy().tolist() == placement.physical_to_logical.tolist()
        assert tables.replica_counts.numpy().tolist() == placement.replica_counts.tolist()
        assert not tables.masked.any()
        for layer, expert in np.ndindex(3, 10):
            count = int(tables.replica_counts[layer, expert])
            slots = tables.logical_to_physical[layer, expert]
            assert (tables.physical_to_logical[layer][slots[:count].long()] == expert).all()
            assert (slots[count:] == -1).all(), "slots of an earlier placement must not linger"


def test_everything_is_masked_until_something_is_published() -> None:
    tables = RoutingTables(1, 4, 2, 2)
    assert tables.masked.all()
    placement = plan_placement(np.ones((1, 4)), None, [0], 2, [0], when_short="mask")
    tables.publish(placement)
    assert tables.masked.sum() == 2


@pytest.mark.parametrize(
    ("table", "experts", "complaint"),
    [
        ([[0, 1, 0, 0]], 2, "3 copies, but the tables hold 2"),
        ([[0, 1]], 2, "4 slots, the placement 2"),
        ([[0, 1, 2, 0]], 3, "for 1 layers of 2 experts"),
    ],
)
def test_a_placement_that_does_not_fit_changes_nothing(table: list[list[int]], experts: int, complaint: str) -> None:
    tables = RoutingTables(1, 2, 4, 2)
    tables.publish(Placement(np.array([[0, 1, 0, 1]]), 2, 1))
    before = [tensor.clone() for tensor in vars(tables).values()]
    with pytest.raises(ValueError, match=complaint):
        tables.publish(Placement(np.array(table), experts, 1))
    assert all(torch.equal(*pair) for pair in zip(before, vars(tables).values(), strict=True))
