"""What the benchmark of stuck ranks makes of its figures."""

from __future__ import annotations

from bench.detection.stuck import CASES, page

HEAD = {
    "command": "python -m bench.detection.stuck",
    "commit": "abc",
    "date": "2026-01-01",
    "machine": {"cpu": "a cpu", "cores": 2, "python": "3", "torch": "2"},
    "setting": {"clients": 4, "sglang": "0.5", "load_average": [1.0, 2.0]},
    "requests": {"answered": 9, "failed": 0, "wrong": 0},
}


def test_the_page_has_the_median_and_the_largest_of_each_case() -> None:
    faults = [
        {"case": case, "rank": 1, "noticed": seconds, "running": 2 * seconds, "rejoined": 3 * seconds}
        for case in CASES
        for seconds in (0.6, 0.5, 0.9)
    ]
    text = page(HEAD, {"faults": faults})
    assert "| a rank is stopped (SIGSTOP) | 3 | 600 (900) | 1200 (1800) | 1800 (2700) |" in text
    assert "| a rank sleeps between two steps | 3 | 600 (900) |" in text
