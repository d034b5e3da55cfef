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
    assert "any 1 rank could go without a repair; alone: 0, 1; 2 before slots run out" in lines[-2]
    assert lines[-1] == "spares: 1 of 2 ready, 1 being prepared"


def test_the_margin_counts_hosts_where_there_are_several() -> None:
    margin = {"any_ranks": 1, "any_hosts": 1, "ranks": [0], "hosts": ["node-0", "node-1"], "repairable_ranks": 2}
    text = render_status({**STATUS, "margin": margin}, 100.0)
    assert "any 1 rank or any 1 host could go without a repair; alone: 0, hosts: node-0, node-1; 2 before" in text
    assert "alone: 0, hosts: none;" in render_status({**STATUS, "margin": {**margin, "hosts": []}}, 100.0)


def test_ranks_say_on_which_host_they_are_where_there_are_several() -> None:
    ranks = {"0": {**RANK, "host": "node-1"}}
    several = render_status({**STATUS, "ranks": ranks, "links": {}}, 100.0)
    assert ("HOST" in several, "node-1" in several) == (True, True)
    assert "HOST" not in render_status({**STATUS, "ranks": ranks, "links": None}, 100.0)


def test_the_ranks_of_other_hosts_are_named() -> None:
    assert "node-1: ranks 2, 3 in" in render_status({**STATUS, "other_hosts": {"node-1": [2, 3]}}, 100.0).splitlines()


def test_the_headline_tells_the_ranks_of_this_host_from_all() -> None:
    here = sum(rank["in"] for rank in STATUS["ranks"].values())
    two = {**STATUS, "links": {}, "other_hosts": {"node-1": [8, 9]}}
    assert f"ranks of this host in   {here + 2} of all hosts" in render_status(two, 100.0)
    assert "of all hosts" not in render_status({**STATUS, "links": None}, 100.0)


def test_a_link_that_ranks_wait_for_is_named() -> None:
    waits = "no link to node-1: ranks of this host that are not in wait for it"
    assert waits in render_status({**STATUS, "missing_links": ["node-1"]}, 100.0).splitlines()
    assert "no link" not in render_status({**STATUS, "missing_links": []}, 100.0)


def test_a_supervisor_that_knows_less_is_shown_too() -> None:
    bare = {"phase": "FORMING", "epoch": 0, "reason": None, "waiting_for": "rank 0", "ranks": {}, "margin": None}
    assert "waiting for: rank 0" in render_status(bare, 0.0)


def test_a_change_under_way_says_how_far_it_is() -> None:
    under_way = {"seconds": 1.5, "settled": [0, 2], "experts": 12, "bytes": {"disk": 3 << 20}, "requests_moved": 0}
    more = {"phase": "AGREED", "active": [0, 1, 2], "change": {"under_way": under_way, "last": None}}
    assert (
        "under way for 1.5 s: 2 of 3 ranks have settled, 12 experts brought in (3 MiB from disk)"
        in render_status({**STATUS, **more}, 100.0).splitlines()
    )


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


def test_roles_room_and_masks_are_shown_where_there_are_any() -> None:
    told = {**RANK, "role": "experts", "room_bytes": 3 << 20}
    more = {"ranks": {"0": {**RANK, "role": "both", "room_bytes": 0}, "1": told}, "masked_experts": 5}
    lines = render_status({**STATUS, **more, "uncovered_experts": 5}, 100.0).splitlines()
    assert "5 experts masked" in lines[0]
    assert "uncovered" not in lines[0]
    start = next(number for number, line in enumerate(lines) if line.startswith("RANK"))
    assert ["ROLE" in lines[start], "ROOM" in lines[start]] == [True, True]
    assert lines[start + 1].split()[:3] == ["0", "ready", "-"]
    assert lines[start + 2].split()[:3] == ["1", "ready", "experts"]
    assert "3.0 MiB" in lines[start + 2]


def test_what_outlives_ranks_is_shown_where_there_is_any() -> None:
    more = {
        "backup": {"from": "live", "pid": 9, "starts": 1, "held": 40, "wanted": 48, "bytes": 3 << 19, "filled": False},
        "context_copies": {"bytes": 1 << 30, "room_tokens": 4096, "covered_tokens": 320, "lag_tokens": 16},
        "anchored": [{"rank": 0, "name": "experts", "size": 5 << 20}, {"rank": 1, "name": "kv", "size": 512}],
    }
    lines = render_status({**STATUS, **more}, 100.0).splitlines()
    assert "backup: 40 of 48 experts (1.5 MiB), process 9" in lines
    assert "context copies: 320 tokens, 16 behind; 1.0 GiB, room for 4096" in lines
    assert "anchored: weights 5.0 MiB, contexts 512 B" in lines
    gone = {**more["backup"], "pid": None, "starts": 3, "held": 0, "wanted": None, "bytes": 0}  # type: ignore[dict-item]
    assert "backup: 0 experts (0 B), does not run, 3 starts" in render_status({**STATUS, "backup": gone}, 100.0)
    bare = render_status({**STATUS, "backup": None, "context_copies": None, "anchored": None}, 100.0)
    assert not any(word in bare for word in ("backup", "copies", "anchored"))
