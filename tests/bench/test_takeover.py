"""What a benchmark of takeovers makes of its figures."""

from __future__ import annotations

from bench.takeover.__main__ import Phase, shortened
from bench.takeover.report import page

HEAD = {
    "command": "python -m bench.takeover",
    "commit": "abc",
    "date": "2026-01-01",
    "machine": {"cpu": "a cpu", "cores": 2, "python": "3", "torch": "2"},
    "setting": {"device": "cpu", "spares": 4, "clients": 8, "tokens": 16, "every": 2.0, "sglang": "0.5"},
    "requests": {"answered": 9, "failed": 0, "wrong": 0},
}
HELD = {
    **{"processes": 16, "descriptors": 900, "host_mib": 10.0, "mappings": 7, "shared_mib": 0.5},
    "device_mib": None,
}


def test_answers_are_of_many_lengths() -> None:
    assert [len(each) for each in shortened([[7] * 64] * 4)] == [40, 48, 56, 64]


def test_a_phase_counts_the_tokens_that_came_in_it() -> None:
    told = Phase(2, 10.0, 14.0).told([9.9, 10.0, 12.0, 13.9, 14.0])
    assert told == {"kills": 2, "seconds": 4.0, "tokens_per_second": 0.8}


def test_a_page_has_all_kills_and_the_mean_of_the_storms() -> None:
    calm = {"kills": 0, "seconds": 8.0, "tokens_per_second": 100.0}
    storms = [{"kills": 8, "seconds": 16.0, "tokens_per_second": rate} for rate in (90.0, 80.0)]
    kills = [{"noticed": 0.002, "running": 0.02, "rejoined": back} for back in (0.1, 0.3, 0.2)]
    told = {"kills": kills, "phases": [calm, storms[0], calm, storms[1]], "before": HELD, "after": HELD}
    text = page(HEAD, told)
    assert "19 kills" in text
    assert "| the rank is back, and all run | 200 | 298 | 300 |" in text
    assert "leaves 85.0 % of the tokens" in text
    assert "device memory" not in text
    assert "kill every" not in page(HEAD, {**told, "phases": []})
