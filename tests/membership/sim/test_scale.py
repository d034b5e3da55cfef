"""A view change costs no more per rank in a large instance than in a small one."""

from __future__ import annotations

import pytest

from tests.membership.sim.scale import view_change_cost


@pytest.mark.parametrize(("linked", "ranks"), [(False, 512), (True, 256)])
def test_messages_grow_no_faster_than_ranks(linked: bool, ranks: int) -> None:
    small, large = view_change_cost(64, linked=linked), view_change_cost(ranks, linked=linked)
    assert large.messages / large.hosts <= 1.2 * small.messages / small.hosts, (small, large)
