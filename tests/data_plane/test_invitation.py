"""When a rank that joins has been let in by every member."""

from __future__ import annotations

import pytest

from eep.data_plane.invitation import inviting_view
from eep.view import View

ALONE = View(0, (), (-1, -1, -1))
OLD = View(3, (0, 1), (0, 0, -1))
INVITES = View(4, (0, 1, 2), (0, 0, 5))
"""Rank 2, in its incarnation 5."""


@pytest.mark.parametrize(
    ("views", "found"),
    [
        ({0: INVITES, 1: INVITES}, True),
        ({0: INVITES, 1: OLD}, False),  # not every member yet
        ({0: INVITES}, False),  # a member does not answer
        ({0: INVITES, 1: ALONE}, True),  # it joins as well
        ({0: OLD, 1: OLD}, False),
        ({}, False),
    ],
)
def test_every_member_must_have_let_it_in(views: dict[int, View], found: bool) -> None:
    assert inviting_view(2, 5, views, 0) == (INVITES if found else None)


@pytest.mark.parametrize(("incarnation", "last_epoch"), [(4, 0), (6, 0), (5, 4), (5, 7)])
def test_the_view_is_for_another_life_or_over(incarnation: int, last_epoch: int) -> None:
    assert inviting_view(2, incarnation, {0: INVITES, 1: INVITES}, last_epoch) is None
