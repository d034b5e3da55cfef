"""Rank processes of a benchmark: all answer, and the error says which rank failed and why."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import pytest

from bench.common.fleet import FleetError, serve_requests, start_ranks


class Adder:
    """A rank that adds its seat to what it is asked."""

    def __init__(self, seat: int) -> None:
        if seat < 0:
            raise ValueError("a seat cannot be negative")
        self._seat = seat

    def add(self, number: int) -> int:
        return self._seat + number

    def end(self) -> None:
        os._exit(7)

    def close(self) -> None:
        pass


def run_adder(seat: int, pipe: Connection) -> None:
    serve_requests(lambda: Adder(seat), pipe)


def test_all_ranks_answer_in_their_order() -> None:
    with start_ranks(run_adder, [10, 20]) as fleet:
        assert fleet.ask("add", 1) == [11, 21]
        assert fleet.ask("add", 2) == [12, 22]


def test_a_rank_that_cannot_start_says_why() -> None:
    with pytest.raises(FleetError, match=r"rank 1 failed(.|\n)*negative"), start_ranks(run_adder, [10, -1]):
        pytest.fail("the fleet must not start")


def test_a_request_that_fails_names_the_rank() -> None:
    with start_ranks(run_adder, [10]) as fleet, pytest.raises(FleetError, match=r"rank 0 failed(.|\n)*TypeError"):
        fleet.ask("add", None)


def test_a_rank_that_ends_is_missed() -> None:
    with start_ranks(run_adder, [10]) as fleet, pytest.raises(FleetError, match="rank 0 ended with code 7"):
        fleet.ask("end")
