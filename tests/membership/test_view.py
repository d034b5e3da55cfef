"""Views are values with rules."""

from __future__ import annotations

import pytest

import eep


def test_ranks_come_and_go() -> None:
    view = eep.View.empty(4).joined_by({0: 0, 1: 0, 3: 2})
    assert view == eep.View(1, (0, 1, 3), (0, 0, -1, 2))
    view = view.without([1, 2])
    assert view == eep.View(2, (0, 3), (0, 0, -1, 2))
    assert view.joined_by({1: 1}, epoch=9) == eep.View(9, (0, 1, 3), (0, 1, -1, 2))
    assert view.joined_by({0: 0}).active == (0, 3)


def test_a_removed_incarnation_never_comes_back() -> None:
    view = eep.View(5, (0,), (0, 3))
    for stale in (0, 3):
        with pytest.raises(ValueError, match="stale"):
            view.joined_by({1: stale})
    assert view.joined_by({1: 4}).active == (0, 1)


@pytest.mark.parametrize(
    "arguments", [(-1, (), ()), (1, (1, 0), (0, 0)), (1, (0, 0), (0,)), (1, (2,), (0, 0)), (1, (1,), (0, -1))]
)
def test_impossible_views(arguments: tuple[int, tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        eep.View(*arguments)
