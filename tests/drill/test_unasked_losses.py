"""Which ranks a drill lost without having done anything to them."""

from __future__ import annotations

from eep.drill.unasked_losses import find_unasked
from eep.view import View

ALL = View(epoch=0, active=(0, 1, 2), incarnations=(0, 0, 0))
WITHOUT_ONE = View(epoch=1, active=(0, 2), incarnations=(0, 0, 0))
BACK = View(epoch=2, active=(0, 1, 2), incarnations=(0, 1, 0))
ANOTHER_LIFE = View(epoch=3, active=(0, 1, 2), incarnations=(0, 2, 0))


def test_a_rank_that_nobody_touched_is_told_with_its_life() -> None:
    assert find_unasked([ALL, WITHOUT_ONE, BACK, ANOTHER_LIFE], {(1, 0)}) == [(1, 1)]


def test_what_was_killed_or_comes_in_is_no_such_loss() -> None:
    assert find_unasked([ALL, WITHOUT_ONE, BACK], {(1, 0)}) == []
    assert find_unasked([WITHOUT_ONE, BACK], set()) == []
    assert find_unasked([], set()) == []


def test_several_are_told_in_order() -> None:
    assert find_unasked([ALL, View(epoch=1, active=(1,), incarnations=(0, 0, 0))], set()) == [(0, 0), (2, 0)]
