"""A view change costs no more per rank in a large instance than in a small one."""

from __future__ import annotations

from tests.membership.sim.scale import view_change_cost


def test_messages_grow_no_faster_than_ranks() -> None:
    small, large = view_change_cost(64), view_change_cost(512)
    assert large.messages / 512 <= 1.2 * small.messages / 64, (small, large)
