"""What a benchmark of takeovers makes of its figures."""

from __future__ import annotations

import pytest

from bench.takeover.__main__ import shortened
from bench.takeover.phases import EDGES, Phase, after
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
    told = Phase("calm", (), 10.0, 14.0).told([9.9, 10.0, 12.0, 13.9, 14.0])
    assert (told["kind"], told["kills"], told["seconds"], told["tokens_per_second"]) == ("calm", 0, 4.0, 0.8)
    assert told["after_kills"] == told["steps_after_kills"] == []


def test_a_phase_counts_the_steps_of_the_ranks_that_stay() -> None:
    steady = [each / 100 for each in range(1000)]
    pausing = [each for each in steady if not 5.0 <= each < 5.1]
    calm = Phase("calm", (), 2.0, 4.0, ((1, 2),), {1: steady, 2: pausing, 3: [3.0]})
    assert calm.told([])["steps_per_second"] == pytest.approx(100.0, abs=1)
    storm = Phase("storm", (5.0,), 4.0, 8.0, ((2,),), {1: steady, 2: pausing})
    assert storm.told([])["steps_after_kills"][:3] == pytest.approx([0.0, 0.0, 100.0], abs=10)
    assert Phase("storm", (5.0,), 4.0, 8.0, ((4,),), {4: [6.0]}).told([])["steps_after_kills"] == [], "too long ago"


def test_what_comes_after_kills_is_the_mean_of_all_of_them() -> None:
    every_ms = [each / 1000 for each in range(10_000)]
    assert after(every_ms, [1.0, 5.0]) == pytest.approx([1000.0] * (len(EDGES) - 1), rel=0.03)
    with_a_pause = [each for each in every_ms if not 5.0 <= each < 5.1]
    assert after(with_a_pause, [1.0, 5.0])[:3] == pytest.approx([500, 500, 1000], rel=0.05)


def test_a_page_has_all_kills_and_the_mean_of_the_storms() -> None:
    rates = [100.0] * (len(EDGES) - 1)
    calm = {
        "kind": "calm",
        "kills": 0,
        "seconds": 8.0,
        "tokens_per_second": 100.0,
        "after_kills": [],
        "steps_per_second": 50.0,
    }
    storms = [
        {
            "kind": kind,
            "kills": 8,
            "seconds": 16.0,
            "tokens_per_second": rate,
            "after_kills": rates,
            "steps_after_kills": [25.0] * (len(EDGES) - 1),
        }
        for kind, rate in (("storm", 90.0), ("storm", 80.0), ("spares", 95.0))
    ]
    kills = [{"noticed": 0.002, "running": 0.02, "rejoined": back} for back in (0.1, 0.3, 0.2)]
    held = [{"kills": number, **HELD} for number in (0, 3, 19)]
    phases = [each for storm in storms for each in (calm, storm)]
    text = page(HEAD, {"kills": kills, "phases": phases, "held": held})
    assert "19 kills" in text
    assert "| the rank is back, and all run | 200 | 298 | 300 |" in text
    assert "leaves 85.0 % of the tokens" in text
    assert "then 8 kills of spares in 16 s | 100 | 95 | 0.950 |" in text
    assert "| 8 kills | 1.0 |" in text
    assert "| steps of the ranks that stay, 8 kills | 0.5 |" in text
    assert "| open descriptors | 900 | 900 | 900 |" in text
    assert "device memory" not in text
    assert "kill every" not in page(HEAD, {"kills": kills, "phases": [], "held": held})
