"""Instructions in the form that is proposed for SGLang, and the status in that form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eep.operations.fault_instruction import FaultInstruction, describe_engines, parse_instruction, why_not_possible
from eep.operations.operation_request import MOST_BYTES, BadOperation
from tests.operations.instance import standing


def parse(**fields: Any) -> FaultInstruction:
    return parse_instruction(json.dumps(fields).encode())


def scale_down(*ranks: int) -> FaultInstruction:
    return parse(instruction="scale_down", params={"removed_dp_ranks": list(ranks)}, request_id="r1")


def test_to_scale_down_is_to_remove_each_of_the_ranks_once() -> None:
    asked = [(each.id, each.action, each.rank) for each in scale_down(3, 1, 3).operations()]
    assert asked == [("ft:r1:1", "remove", 1), ("ft:r1:3", "remove", 3)]


def test_to_retry_is_to_do_nothing() -> None:
    assert parse(instruction="retry").operations() == ()
    assert parse(instruction="retry", params={"timeout": 30}).operations() == (), "fields of other drafts do no harm"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"instruction": "pause"}, "'pause' is no instruction here; there are retry, scale_down"),
        ({}, "instruction"),
        ({"instruction": "scale_down"}, "scale_down needs 'removed_dp_ranks'"),
        ({"instruction": "scale_down", "params": {"removed_dp_ranks": []}}, "removed_dp_ranks"),
        ({"instruction": "scale_down", "params": {"removed_dp_ranks": list(range(17))}}, "removed_dp_ranks"),
        ({"instruction": "scale_down", "params": {"removed_dp_ranks": [-1]}}, "removed_dp_ranks"),
        ({"instruction": "scale_down", "params": {"removed_dp_ranks": ["1"]}}, "removed_dp_ranks"),
        ({"instruction": "retry", "params": {"removed_dp_ranks": [1]}}, "retry takes no 'removed_dp_ranks'"),
        ({"instruction": "retry", "request_id": "a b"}, "request_id"),
        ({"instruction": "retry", "request_id": "x" * 49}, "request_id"),
    ],
)
def test_what_is_no_instruction_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOperation, match=said):
        parse(**fields)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b" " * (MOST_BYTES + 1)])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadOperation):
        parse_instruction(body)


def test_ranks_that_cannot_all_go_stay_all() -> None:
    now = standing()  # four of six, and three suffice
    assert why_not_possible(scale_down(3), now) is None
    assert why_not_possible(scale_down(3, 5), now) is None, "one of them is out already"
    assert why_not_possible(scale_down(2, 3), now) == "2 ranks would stay, and it takes 3"
    assert "no ranks [9]" in str(why_not_possible(scale_down(9), now))
    assert why_not_possible(parse(instruction="retry"), standing(serve=1)) is None


def test_a_status_shows_each_rank_that_was_ever_there_as_an_engine() -> None:
    rank = {"in": True, "pid": 5, "incarnation": 0, "wanted": True}
    ranks = {
        "10": {**rank, "in": False, "pid": None, "incarnation": 2},
        "0": rank,
        "1": {**rank, "in": False},
        "11": {**rank, "in": False, "pid": None, "incarnation": -1, "wanted": False},
    }
    assert describe_engines({"ranks": ranks}, "down-1") == {
        "schema_version": 1,
        "total_engines": 3,
        "engines": [
            {"id": 0, "status": "healthy"},
            {"id": 1, "status": "unhealthy"},
            {"id": 10, "status": "dead"},
        ],
        "last_ft_request_id": "down-1",
    }
