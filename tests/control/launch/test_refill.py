"""When another spare is prepared: pure, with a clock of the test's own."""

from __future__ import annotations

import pytest

from eep.control.launch.refill import LONGEST, SETTLES_WITHIN, SHORTEST, Refill


def test_a_pool_that_is_full_or_being_filled_is_left_alone() -> None:
    refill = Refill(2)
    assert refill.wait(0.0, ready=0, preparing=0) == 0
    assert refill.wait(0.0, ready=1, preparing=0) == 0
    assert refill.wait(0.0, ready=0, preparing=1) is None, "one after the other"
    assert refill.wait(0.0, ready=2, preparing=0) is None
    assert Refill(0).wait(0.0, ready=0, preparing=0) is None


def test_nothing_is_prepared_while_a_rank_starts() -> None:
    refill = Refill(1)
    refill.launched(10.0, 0, 3)
    refill.launched(12.0, 1, 0)
    assert refill.wait(12.0, 0, 0) == SETTLES_WITHIN
    refill.runs({1: 0})
    assert refill.wait(12.0, 0, 0) == SETTLES_WITHIN - 2, "rank 0 is still on its way"
    refill.runs({0: 2, 1: 0})
    assert refill.wait(12.0, 0, 0) == SETTLES_WITHIN - 2, "that was an earlier life of rank 0"
    refill.runs({0: 3, 1: 0})
    assert refill.wait(12.0, 0, 0) == 0


def test_with_cores_to_spare_several_are_prepared_at_once() -> None:
    refill = Refill(3, free_cores=2)
    assert refill.wait(0.0, ready=0, preparing=1) == 0
    assert refill.wait(0.0, ready=0, preparing=2) is None, "there are two cores"
    assert refill.wait(0.0, ready=1, preparing=1) == 0
    assert refill.wait(0.0, ready=2, preparing=1) is None, "three are wanted"


def test_with_cores_to_spare_only_the_first_ranks_are_waited_for() -> None:
    refill = Refill(1, free_cores=1)
    refill.launched(0.0, 0, 0)
    assert refill.wait(0.0, 0, 0) == SETTLES_WITHIN
    refill.runs({0: 0})
    refill.launched(5.0, 0, 1)
    assert refill.wait(5.0, 0, 0) == 0


def test_a_rank_that_never_runs_is_not_waited_for_without_end() -> None:
    refill = Refill(1)
    refill.launched(0.0, 0, 0)
    assert refill.wait(SETTLES_WITHIN / 2, 0, 0) == SETTLES_WITHIN / 2
    assert refill.wait(SETTLES_WITHIN, 0, 0) == 0
    refill.launched(SETTLES_WITHIN, 0, 1)
    assert refill.wait(SETTLES_WITHIN, 0, 0) == SETTLES_WITHIN, "its next life has its own time"


def test_what_keeps_dying_is_tried_less_and_less_often() -> None:
    refill, now, waits = Refill(1), 0.0, []
    for _ in range(10):
        refill.died(now, lived=0.1)
        wait = refill.wait(now, 0, 0)
        assert wait is not None
        waits.append(wait)
        now += wait
        assert refill.wait(now, 0, 0) == 0
    assert waits[:3] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]
    assert waits[-1] == LONGEST
    assert waits == sorted(waits)


def test_one_that_was_of_use_or_lived_long_clears_the_record() -> None:
    refill = Refill(1)
    for _ in range(5):
        refill.died(0.0, lived=0.1)
    refill.taken()
    refill.died(100.0, lived=0.1)
    assert refill.wait(100.0, 0, 0) == SHORTEST
    for _ in range(5):
        refill.died(200.0, lived=0.1)
    refill.died(300.0, lived=LONGEST)
    assert refill.wait(300.0, 0, 0) == SHORTEST


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 spares"):
        Refill(-1)
