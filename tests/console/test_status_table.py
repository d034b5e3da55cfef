from __future__ import annotations

from typing import Any

from eep.console.status_table import brief, colored, render_status

RANK = {"status": "ready", "in": True, "incarnation": 2, "pid": 77, "since": 40.0, "still_for": 0.1, "failures": 0}
STATUS: dict[str, Any] = {
    "phase": "RUN",
    "epoch": 9,
    "reason": "rank 1 joined",
    "waiting_for": "",
    "ranks": {
        "0": {**RANK, "requests": 3, "kv_tokens": 50, "kv_room": 200, "experts": 24, "device": "cuda:0"},
        "1": {**RANK, "in": False},
        "10": {**RANK, "status": "down", "in": False, "incarnation": -1, "pid": None, "still_for": None},
    },
    "margin": {"any_ranks": 1, "ranks": [0, 1], "repairable_ranks": 2},
    "spares": {"wanted": 2, "ready": 1, "preparing": 1},
}


def test_the_table_has_a_line_for_each_rank_in_their_order() -> None:
    lines = render_status(STATUS, 100.0).splitlines()
    assert lines[0] == "RUN   epoch 9   1 of 3 ranks in"
    start = next(number for number, line in enumerate(lines) if line.startswith("RANK"))
    first, second, third = (line.split() for line in lines[start + 1 : start + 4])
    assert first == ["0", "ready", "2", "77", "60", "s", "0.1", "s", "3", "25%", "24", "cuda:0"]
    assert second[:4] == ["1", "ready,", "not", "in"]
    assert third[:4] == ["10", "down", "-", "-"]
    assert "FAILED" not in lines[start], "a column in which nothing stands is left out"
    assert "any 1 ranks could go without a repair; alone: 0, 1; 2 before slots run out" in lines[-2]
    assert lines[-1] == "spares: 1 of 2 ready, 1 being prepared"


def test_a_supervisor_that_knows_less_is_shown_too() -> None:
    bare = {"phase": "FORMING", "epoch": 0, "reason": None, "waiting_for": "rank 0", "ranks": {}, "margin": None}
    assert "waiting for: rank 0" in render_status(bare, 0.0)


def test_trouble_and_operations_are_told() -> None:
    operation = {"id": "grow", "action": "scale", "state": "running", "reason": "4 of 6 ranks serve"}
    more = {"uncovered_experts": 3, "draining": True, "operations": [operation], "open_requests": 0}
    text = render_status({**STATUS, **more}, 100.0)
    assert "3 experts uncovered" in text
    assert "draining" in text
    assert "operation grow: scale running, 4 of 6 ranks serve" in text


def test_colours_change_no_column() -> None:
    painted = render_status(STATUS, 100.0, colored)
    for style in ("\x1b[32m", "\x1b[31m", "\x1b[33m", "\x1b[1m", "\x1b[0m"):
        assert style in painted
        painted = painted.replace(style, "")
    assert painted == render_status(STATUS, 100.0)


def test_times_are_brief() -> None:
    assert [brief(seconds) for seconds in (-1, 0.4, 119, 120, 7300, 90000, 200000)] == [
        *("0 s", "0 s", "119 s", "2 min", "2 h", "25 h", "2 d")
    ]
