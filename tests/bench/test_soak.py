"""How a soak judges growth."""

from __future__ import annotations

from typing import Any

import pytest

from bench.soak.flatness import Verdict, judge_growth
from bench.soak.report import complaints


def verdict(name: str, values: list[float]) -> Verdict:
    (found,) = judge_growth([{name: value} for value in values])
    return found


def test_what_stays_the_same_is_flat() -> None:
    assert verdict("files: sockets", [7.0] * 40).is_flat


def test_one_file_more_in_the_end_is_growth() -> None:
    found = verdict("files: sockets", [7.0] * 20 + [8.0] * 20)
    assert not found.is_flat
    assert (found.first, found.last) == (7.0, 8.0)


def test_what_grows_only_while_it_warms_up_is_flat() -> None:
    assert verdict("files: metrics", [1.0, 3.0, 5.0, 9.0] + [9.0] * 36).is_flat


def test_a_single_sample_does_not_decide() -> None:
    assert verdict("descriptors: main", [50.0] * 39 + [90.0]).is_flat


def test_memory_may_grow_a_little_and_no_more() -> None:
    assert verdict("pss MiB: main", [100.0] * 20 + [107.0] * 20).is_flat
    assert not verdict("pss MiB: main", [100.0] * 20 + [109.0] * 20).is_flat
    assert not verdict("pss MiB: main", [1000.0 + each for each in range(40 * 3)]).is_flat


def test_the_event_log_may_grow_to_its_limit() -> None:
    assert verdict("bytes: event log", [1000.0 * each for each in range(40)]).is_flat
    assert not verdict("bytes: event log", [1e6 * each for each in range(40)]).is_flat


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        judge_growth([{"files: held": 1.0}] * 7)


GOOD = {"verdicts": [], "requests": 9, "failed": [], "wrong": 0, "left_over": [], "deaths": 30, "wanted": 30}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, []),
        ({"verdicts": [{"name": "files: held", "is_flat": False}]}, ["files: held grew"]),
        ({"requests": 0}, ["no request was answered"]),
        ({"failed": ["503"]}, ["requests failed"]),
        ({"wrong": 1}, ["tokens were wrong"]),
        ({"left_over": ["process 7"]}, ["left over: process 7"]),
        ({"deaths": 27}, ["only 27 of 30 deaths in the time"]),
    ],
)
def test_why_a_soak_has_not_passed(found: dict[str, Any], said: list[str]) -> None:
    assert complaints({**GOOD, **found}) == said
