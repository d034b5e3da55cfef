"""The functions of the contract: each clause holds for a valid instance, and each function finds a broken one."""

from __future__ import annotations

import numpy as np
import pytest

from eep.abi.peer_table import PeerTable, slot_of
from eep.experts.placement.slot_plan import Placement, plan_placement
from eep.experts.routing_tables import RoutingTables
from eep.recovery.contract import (
    ContractBroken,
    addresses_of,
    check_coverage,
    check_peers,
    check_placements,
    check_routing,
)
from eep.view import View

VIEW = View(3, (0, 2), (1, 0, 4))


def table() -> PeerTable:
    made = PeerTable(epoch=3)
    for rank in VIEW.active:
        entry = made.peers[rank]
        entry.active, entry.region, entry.control = 1, 4096, 8192
        entry.incarnation, entry.slot = VIEW.incarnations[rank], slot_of(rank, VIEW.incarnations[rank], 3)
    return made


def placement() -> Placement:
    return plan_placement(np.ones((2, 4)), None, VIEW.active, 2, [0] * 3)


@pytest.mark.parametrize(
    ("rank", "field", "value"),
    [(0, "active", 0), (1, "active", 1), (2, "incarnation", 5), (2, "region", 0), (0, "slot", 9)],
)
def test_a_wrong_entry_of_the_peer_table_is_found(rank: int, field: str, value: int) -> None:
    broken = table()
    check_peers(VIEW, broken)
    setattr(broken.peers[rank], field, value)
    with pytest.raises(ContractBroken, match=rf"peer set: .*rank {rank}\b"):
        check_peers(VIEW, broken)


def test_a_peer_table_of_another_epoch_is_found() -> None:
    broken = table()
    broken.epoch = 2
    with pytest.raises(ContractBroken, match="epoch 2"):
        check_peers(VIEW, broken)


def test_an_expert_without_a_copy_is_found() -> None:
    check_coverage(VIEW, placement())
    with pytest.raises(ContractBroken, match="have no copy"):
        check_coverage(VIEW.without([2]), placement())


def test_a_rank_that_placed_experts_differently_from_most_ends() -> None:
    check_placements(VIEW, 7, 7)
    with pytest.raises(ContractBroken, match="graph-visible routing: most ranks placed the experts of epoch 3 differ"):
        check_placements(VIEW, 7, 8)


def published() -> tuple[RoutingTables, dict[str, int]]:
    """Tables that show the placement, and where they lie."""
    tables = RoutingTables(2, 4, 6, 3)
    addresses = addresses_of(tables)
    tables.publish(placement())
    check_routing(placement(), tables, addresses)
    return tables, addresses


def test_a_routing_table_that_shows_another_placement_is_found() -> None:
    tables, addresses = published()
    tables.physical_to_logical[0, 0] = 3 - tables.physical_to_logical[0, 0]
    with pytest.raises(ContractBroken, match="slot 0 of layer 0"):
        check_routing(placement(), tables, addresses)


def test_tables_that_count_other_copies_are_found() -> None:
    tables, addresses = published()
    tables.replica_counts[0, 0] += 1
    with pytest.raises(ContractBroken, match="count other copies"):
        check_routing(placement(), tables, addresses)


def test_a_routing_table_that_has_moved_is_found() -> None:
    tables, addresses = published()
    tables.physical_to_logical = tables.physical_to_logical.clone()
    with pytest.raises(ContractBroken, match="has moved"):
        check_routing(placement(), tables, addresses)
