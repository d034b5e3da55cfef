"""Loads that the bench of the balance knows."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from bench.balance import record
from bench.balance.traces import TRACES, loads, recorded_loads


@pytest.mark.parametrize("trace", TRACES)
def test_a_load_is_made_from_its_seed(trace: str) -> None:
    looks = [np.stack(list(loads(trace, 3, 16, 5, seed))) for seed in (1, 1, 2)]
    assert np.array_equal(looks[0], looks[1])
    assert not np.array_equal(looks[0], looks[2])


def test_the_recorded_load_is_skewed_and_changes() -> None:
    recorded = np.stack(recorded_loads())
    looks, layers, experts = recorded.shape
    assert (layers, experts) == (record.SIZE.layers, record.SIZE.experts)
    assert looks >= 16
    shares = recorded / recorded.sum(axis=2, keepdims=True)
    assert (recorded.sum(axis=(1, 2)) > 0).all()
    assert (shares.max(axis=2).mean(axis=1) > 2 / experts).all(), "some experts are asked for far more than others"
    assert np.abs(shares[0] - shares[-1]).sum(axis=1).mean() > 0.1


def test_what_the_server_reads_is_the_same_in_every_recording() -> None:
    first, again = (list(islice(record.prompts_of_looks(), 3)) for _ in range(2))
    assert first == again
    assert first[0] != first[1]
    assert all(0 <= token < 256 for prompts in first for prompt in prompts for token in prompt)
