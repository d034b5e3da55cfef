"""Which silences of a server count as a standstill."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eep.drill.silences import Silence, find_silences
from eep.view import View

BOTH = View(epoch=3, active=(0, 1), incarnations=(0, 0))
ONE = View(epoch=4, active=(0,), incarnations=(0, 0))
NONE = View(epoch=5, active=(), incarnations=(0, 0))


def test_a_server_that_says_nothing_in_a_view_that_runs_stands_still() -> None:
    assert find_silences([1.0, 2.0, 9.0], [(0.0, BOTH, True)], [], 0.0, 10.0, 4.0) == [Silence(2.0, 7.0, 3)]


@pytest.mark.parametrize(
    "views",
    [
        pytest.param([(0.0, BOTH, True), (5.0, ONE, True)], id="the view changed meanwhile"),
        pytest.param([(0.0, BOTH, True), (2.5, ONE, False), (8.5, ONE, True)], id="it was repaired meanwhile"),
        pytest.param([(0.0, BOTH, True), (2.5, NONE, True), (8.5, ONE, True)], id="no rank was left"),
    ],
)
def test_what_happened_to_the_view_excuses_a_silence(views: list[tuple[float, View, bool]]) -> None:
    assert find_silences([1.0, 2.0, 9.0], views, [], 0.0, 10.0, 4.0) == []


def test_a_rank_that_is_stopped_excuses_its_peers_but_not_for_longer() -> None:
    views = [(0.0, BOTH, True)]
    assert find_silences([1.0, 9.0], views, [(2.0, 6.0)], 0.0, 10.0, 4.0) == []
    assert find_silences([1.0, 19.0], views, [(2.0, 6.0)], 0.0, 20.0, 4.0) == [Silence(6.0, 13.0, 3)]


def test_silence_at_the_end_counts() -> None:
    assert find_silences([1.0], [(0.0, BOTH, True)], [], 0.0, 10.0, 4.0) == [Silence(1.0, 9.0, 3)]


@given(st.lists(st.floats(0.0, 100.0)), st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 100.0))))
def test_no_silence_has_a_token_or_an_excuse_in_it(tokens: list[float], ends: list[tuple[float, float]]) -> None:
    stops = [(min(pair), max(pair)) for pair in ends]
    found = find_silences(tokens, [(0.0, BOTH, True), (50.0, ONE, True)], stops, 0.0, 100.0, 4.0)
    for silence in found:
        start, end = silence.at, silence.at + silence.seconds
        assert end - start > 4.0 - 1e-9
        assert not [at for at in tokens if start + 1e-9 < at < end - 1e-9]
        assert not [stop for stop in stops if start + 1e-9 < stop[1] and stop[0] < end - 1e-9 and stop[0] < stop[1]]
    if not stops and not found:
        heard = sorted({0.0, 50.0, 100.0, *tokens})
        assert all(last - first <= 4.0 for first, last in pairwise(heard))
