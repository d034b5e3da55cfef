"""The processes of the GPU benchmark do what they are sent, which needs no GPU."""

from __future__ import annotations

import math

import pytest

from bench.exchange.cuda_fleet import start_cuda_ranks


def test_one_process_makes_a_measurement_alone() -> None:
    with start_cuda_ranks("streams", 2) as fleet:
        assert fleet.ask_one(math.gcd, 12, 18) == 6
        with pytest.raises(RuntimeError, match=r"process 0 failed in sqrt\(-1,\): ValueError"):
            fleet.ask_one(math.sqrt, -1)
