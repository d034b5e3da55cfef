"""The contract as a function: each clause holds, and each is missed when it is broken."""

from __future__ import annotations

import numpy as np
import pytest

from eep.abi.peer_table import PeerTable, slot_of
from eep.experts.placement.slot_plan import Placement, plan_placement
from eep.experts.routing_tables import RoutingTables
from eep.recovery.contract import ContractBroken, addresses_of, check_coverage, check_peers, check_routing
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
def test_peer_set(rank: int, field: str, value: int) -> None:
    check_peers(VIEW, table())
    broken = table()
    setattr(broken.peers[rank], field, value)
    with pytest.raises(ContractBroken, match="peer set"):
        check_peers(VIEW, broken)
    broken = table()
    broken.epoch = 2
    with pytest.raises(ContractBroken, match="epoch 2"):
        check_peers(VIEW, broken)


def test_coverage() -> None:
    check_coverage(VIEW, placement())
    with pytest.raises(ContractBroken, match="have no copy"):
        check_coverage(VIEW.without([2]), placement())


def test_routing() -> None:
    tables = RoutingTables(2, 4, 6, 3)
    addresses = addresses_of(tables)
    tables.publish(placement())
    check_routing(placement(), tables, addresses)
    tables.physical_to_logical[0, 0] = 3 - tables.physical_to_logical[0, 0]
    with pytest.raises(ContractBroken, match="slot 0 of layer 0"):
        check_routing(placement(), tables, addresses)
    tables.physical_to_logical = tables.physical_to_logical.clone()
    with pytest.raises(ContractBroken, match="has moved"):
        check_routing(placement(), tables, addresses)
