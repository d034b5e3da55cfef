from __future__ import annotations

import numpy as np

from eep.experts.registry.published_records import ModelShape, RankRecord, encode_record
from eep.operations.held_experts import count_held


def record(numbers: list[int], layers: int = 2, experts: int = 3) -> bytes:
    table = np.array(numbers, dtype="<i8").tobytes()
    return encode_record(RankRecord(0, "", 0, len(numbers) // layers, ModelShape(layers, experts, (4,)), table, table))


def test_copies_are_counted_over_the_ranks_that_are_in() -> None:
    records = {
        "held/r0.i1": record([0, 1, 1, 3, 4, -1]),
        "held/r1.i0": record([1, 2, -1, 4, 5, 3]),
        "held/r1.i9": record([0, 0, 0, 3, 3, 3]),
        "held/r2.i0": record([0, 0, 0, 3, 3, 3]),
        "held/r3.i0": b"no record",
        "margin": b"{}",
    }
    held = count_held(records, {0: 1, 1: 0, 3: 0})
    assert held.copies == [[1, 2, 1], [2, 2, 1]]
    assert held.by_rank == {0: 4, 1: 5}, "an expert in two slots of a rank is one"
    assert held.uncovered == 0
    assert count_held(records, {0: 1}).uncovered == 2
    assert count_held({}, {}).copies == []
