"""A rank is alive while its process gets on: in, or on its way."""

from __future__ import annotations

from typing import Any

import pytest

from eep.operations.rank_liveness import STILL_S, RankLife

IN: dict[str, Any] = {"status": "ready", "in": True, "pid": 7, "still_for": None}
STARTING = {**IN, "status": "starting", "in": False}


@pytest.mark.parametrize(("told", "state"), [(IN, "in"), (STARTING, "starting"), ({**IN, "in": False}, "ready")])
def test_a_rank_with_a_process_that_gets_on_is_alive(told: dict[str, Any], state: str) -> None:
    assert RankLife.of(told).state == state
    assert RankLife.of(told).is_alive(STILL_S)
    assert RankLife.of({**told, "still_for": 29.9}).is_alive(STILL_S)


@pytest.mark.parametrize("told", [IN, STARTING])
def test_a_rank_that_stands_still_for_too_long_is_not(told: dict[str, Any]) -> None:
    still = RankLife.of({**told, "still_for": 30.1})
    assert not still.is_alive(STILL_S)
    assert still.is_alive(60.0)


@pytest.mark.parametrize("status", ["down", "resting", "wanted"])
def test_a_rank_without_a_process_is_not(status: str) -> None:
    assert not RankLife.of({**STARTING, "status": status, "pid": None}).is_alive(STILL_S)
