"""What gates ask for, added up, and whether it is worth a move."""

from __future__ import annotations

import numpy as np
import pytest

from eep.experts.balancing.asked_load import AskedLoad, balancedness, is_worth
from eep.experts.placement.slot_plan import Placement


def test_only_what_was_counted_since_the_last_look_is_new() -> None:
    asked = AskedLoad(1, 2)
    asked.look({"a": np.array([[100.0, 0.0]])})
    assert asked.load.tolist() == [[0.0, 0.0]], "nobody knows how old that is"
    asked.look({"a": np.array([[110.0, 6.0]]), "b": np.array([[50.0, 50.0]])})
    assert asked.load.tolist() == [[10.0, 6.0]]
    asked.look({"a": np.array([[110.0, 6.0]]), "b": np.array([[50.0, 54.0]])})
    assert asked.load.tolist() == [[5.0, 7.0]], "what is older counts less"


def test_a_rank_that_starts_again_counts_from_nothing() -> None:
    asked = AskedLoad(1, 2)
    asked.look({"r0.i0": np.array([[100.0, 0.0]])})
    asked.look({"r0.i1": np.array([[4.0, 2.0]])})
    asked.look({"r0.i1": np.array([[5.0, 4.0]])})
    assert asked.load.tolist() == [[1.0, 2.0]]


def test_a_few_picks_are_not_enough() -> None:
    asked = AskedLoad(2, 2)
    asked.look({"a": np.zeros((2, 2))})
    asked.look({"a": np.array([[100.0, 100.0], [1.0, 0.0]])})
    assert not asked.is_enough
    asked.look({"a": np.array([[200.0, 200.0], [100.0, 50.0]])})
    assert asked.is_enough


def test_balancedness_is_one_where_all_have_the_same() -> None:
    placement = Placement(np.array([[0, 1, 2, 3], [0, 1, 2, 3]]), 4, 2)
    assert balancedness(placement, np.array([[1.0, 1, 1, 1], [3.0, 0, 1, 0]])).tolist() == pytest.approx([1, 2 / 3])


@pytest.mark.parametrize(("picks", "worth"), [(10, False), (10_000, True)])
def test_the_fewer_picks_the_more_they_must_promise(picks: int, worth: bool) -> None:
    """With few of them, chance alone makes one rank look busier."""
    before, after = Placement(np.array([[0, 1, 2, 3]]), 4, 2), Placement(np.array([[0, 2, 1, 3]]), 4, 2)
    load = picks * np.array([[1.0, 1.0, 0.8, 0.8]])
    assert is_worth(before, after, load) is worth
    assert not is_worth(before, before, load)
