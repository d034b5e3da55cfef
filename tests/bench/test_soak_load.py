"""How a soak beside busy processes counts what should not be."""

from __future__ import annotations

from typing import Any

import pytest

from bench.soak.burners import Burners
from bench.soak.load_report import complaints, page
from bench.soak.losses import losses_after
from eep.observe.event_log import EventLine

BOTH = {0: 0, 1: 0}


def line(phase: str, rank: int | None = 1, *, at: float = 10.0, cause: str = "because") -> EventLine:
    return EventLine(at, "host", phase, 3, rank, None if rank is None else 0, cause, "", None, "")


def test_lines_before_the_load_and_lines_about_the_instance_do_not_count() -> None:
    found = losses_after([line("FENCING", at=9.0), line("RUN", None), line("READY")], 9.5, BOTH, BOTH)
    assert (found.lives, found.stalls, found.suspicions, found.lines) == ((), 0, 0, ())


def test_a_rank_that_is_fenced_and_exits_is_one_life() -> None:
    stands = "rank 1 made no progress for 0.6 s: it hangs"
    found = losses_after([line("FENCING", cause=stands), line("EXITED")], 9.5, BOTH, {0: 0, 1: 2})
    assert found.lives == ((1, 0),)
    assert found.stalls == 1
    assert stands in found.lines[0]


def test_a_life_that_the_log_does_not_tell_of_counts() -> None:
    assert losses_after([], 9.5, BOTH, {0: 2, 1: 0}).lives == ((0, 0),)


def test_a_suspicion_counts_also_if_no_rank_is_lost() -> None:
    found = losses_after([line("SUSPECTED")], 9.5, BOTH, BOTH)
    assert (found.lives, found.suspicions) == ((), 1)


GOOD: dict[str, Any] = {
    **{"lives": [], "stalls": 0, "suspicions": 0, "lines": [], "requests": 9, "failed": [], "wrong": 0},
    **{"burners": 15, "burners_left": 15, "left_over": []},
}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, []),
        ({"lives": [[1, 0]]}, ["ranks were lost without a fault: 1 (life 0)"]),
        ({"stalls": 2}, ["2 times a rank was said to stand still"]),
        ({"suspicions": 1}, ["1 times a rank suspected another"]),
        ({"requests": 0}, ["no request was answered"]),
        ({"failed": ["503"]}, ["requests failed"]),
        ({"wrong": 1}, ["tokens were wrong"]),
        ({"burners_left": 14}, ["busy processes ended before the time"]),
        ({"left_over": ["process 7"]}, ["left over: process 7"]),
    ],
)
def test_why_a_soak_beside_busy_processes_has_not_passed(found: dict[str, Any], said: list[str]) -> None:
    assert complaints({**GOOD, **found}) == said


def test_the_page_shows_the_lines_of_a_rank_that_was_lost() -> None:
    told = {
        **{**GOOD, "lives": [[1, 0]], "lines": ["rank 1 hangs"], "complaints": ["ranks were lost"], "seconds": 60.0},
        **{"command": "python -m bench.soak.load", "commit": "0", "date": "today", "clients": 2, "largest_gap": 1.0},
        **{"load_median": 15.0, "load_most": 16.0, "machine": {"cpu": "a", "cores": 2, "python": "3"}},
    }
    assert "not passed: ranks were lost" in page(told)
    assert "rank 1 hangs" in page(told)


def test_busy_processes_compute_until_the_block_ends() -> None:
    with Burners(2) as burners:
        assert burners.alive == 2
    assert burners.alive == 0
