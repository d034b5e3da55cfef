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
    assert asked.load.tolist() == [[0.0, 4.0]]


def test_a_rank_that_starts_again_counts_from_nothing() -> None:
    asked = AskedLoad(1, 2)
    asked.look({"r0.i0": np.array([[100.0, 0.0]])})
    asked.look({"r0.i1": np.array([[4.0, 2.0]])})
    asked.look({"r0.i1": np.array([[5.0, 4.0]])})
    assert asked.load.tolist() == [[1.0, 2.0]]


def look_at(looks: list[np.ndarray]) -> AskedLoad:
    asked, counted = AskedLoad(*looks[0].shape), np.zeros_like(looks[0])
    for fresh in [counted, *looks]:
        counted = counted + fresh
        asked.look({"a": counted})
    return asked


def test_where_looks_differ_by_chance_many_of_them_count() -> None:
    chance, popular = np.random.default_rng(3), np.array([[80.0, 40, 20, 10, 5, 5]])
    asked = look_at([chance.poisson(popular).astype(float) for _ in range(30)])
    assert asked.load.sum() > 4 * popular.sum()
    assert asked.load[0, 0] / asked.load.sum() == pytest.approx(0.5, abs=0.1)


def test_where_the_load_moves_on_the_newest_look_counts() -> None:
    looks = [np.eye(8)[[look // 2 % 8]] * 100.0 + 10.0 * look for look in range(1, 30)]
    assert look_at(looks).load.tolist() == looks[-1].tolist()


def test_a_load_that_has_moved_on_for_good_is_not_remembered_for_long() -> None:
    chance, popular = np.random.default_rng(3), np.array([[800.0, 40, 20, 10, 5, 5]])
    looks = [chance.poisson(popular).astype(float) for _ in range(20)]
    looks += [chance.poisson(popular[:, ::-1]).astype(float) for _ in range(3)]
    shares = look_at(looks).load / look_at(looks).load.sum()
    assert shares[0, 0] < 0.05
    assert shares[0, 5] > 0.8


def test_a_look_at_which_nothing_was_asked_for_changes_nothing() -> None:
    looks = [np.array([[30.0, 10.0]]), np.array([[20.0, 20.0]])]
    assert look_at([*looks, np.zeros((1, 2))]).load.tolist() == look_at(looks).load.tolist()


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
