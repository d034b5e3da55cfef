"""The processes of the GPU benchmark do what they are sent, which needs no GPU."""

from __future__ import annotations

import math
import operator
import os

import pytest

from bench.exchange.cuda_fleet import start_cuda_ranks


def test_one_process_makes_a_measurement_alone() -> None:
    with start_cuda_ranks("streams", 2) as fleet:
        assert fleet.ask_one(math.gcd, 12, 18) == 6
        with pytest.raises(RuntimeError, match=r"process 0 failed in sqrt\(-1,\): ValueError"):
            fleet.ask_one(math.sqrt, -1)


def test_a_process_that_ends_is_told_of() -> None:
    with (
        start_cuda_ranks("processes", 2) as fleet,
        pytest.raises(RuntimeError, match=r"process 0 ended in _exit\(3,\)"),
    ):
        fleet.ask_one(os._exit, 3)


def test_all_processes_do_something_together() -> None:
    with start_cuda_ranks("processes", 3) as fleet:
        assert fleet.ask_all(operator.add, [10]) == [[0, 10], [1, 10], [2, 10]]
