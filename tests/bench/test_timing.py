"""What many times come to."""

from __future__ import annotations

from bench.common.timing import median_seconds, percentile


def test_a_percentile_is_one_of_the_values() -> None:
    values = [3.0, 1.0, 2.0, 4.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 4.0, 4.0]


def test_the_first_run_only_warms_up() -> None:
    runs: list[int] = []
    assert median_seconds(lambda: runs.append(1), 4) >= 0
    assert len(runs) == 5
