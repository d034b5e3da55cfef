from __future__ import annotations

import json
from typing import Any

import pytest

from eep.operations.operation_request import MOST_BYTES, BadOperation, parse_request


def parse(**fields: Any) -> Any:
    return parse_request(json.dumps(fields).encode())


def test_a_request_is_read_as_it_was_written() -> None:
    request = parse(id="deploy-7", action="scale", ranks=6, deadline_s=30)
    assert (request.id, request.action, request.ranks, request.rank, request.deadline_s) == (
        *("deploy-7", "scale", 6, None),
        30,
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"action": "drain"}, "id"),
        ({"id": "a b", "action": "drain"}, "id"),
        ({"id": "a\n", "action": "drain"}, "id"),
        ({"id": "..", "action": "drain"}, "id"),
        ({"id": "", "action": "drain"}, "id"),
        ({"id": "é", "action": "drain"}, "id"),
        ({"id": "a/b", "action": "drain"}, "id"),
        ({"id": 7, "action": "drain"}, "id"),
        ({"id": "x", "action": ["drain"]}, "action"),
        ({"id": "x", "action": None}, "action"),
        ({"id": "x", "action": "kill", "rank": True}, "rank"),
        ({"id": "x", "action": "kill", "rank": 1.0}, "rank"),
        ({"id": "x", "action": "kill", "rank": 1 << 80}, "rank"),
        ({"id": "x", "action": "scale", "ranks": "6"}, "ranks"),
        ({"id": "x", "action": "role", "rank": 1, "role": "all"}, "role"),
        ({"id": "x", "action": "drain", "deadline_s": True}, "deadline_s"),
        ({"id": "x", "action": "drain", "deadline_s": -0.0}, "deadline_s"),
        ({"id": "x", "action": "drain", "deadline_s": float("nan")}, "malformed"),
        ({"id": "x", "action": "drain", "deadline_s": float("inf")}, "malformed"),
        ({"id": "x" * 65, "action": "drain"}, "id"),
        ({"id": "x", "action": "format"}, "action"),
        ({"id": "x", "action": "remove"}, "needs 'rank'"),
        ({"id": "x", "action": "remove", "rank": -1}, "rank"),
        ({"id": "x", "action": "remove", "rank": 1, "ranks": 2}, "takes no 'ranks'"),
        ({"id": "x", "action": "scale"}, "needs 'ranks'"),
        ({"id": "x", "action": "scale", "ranks": 0}, "ranks"),
        ({"id": "x", "action": "scale", "ranks": 3, "rank": 1}, "leave out 'rank'"),
        ({"id": "x", "action": "drain", "deadline_s": 0}, "deadline_s"),
        ({"id": "x", "action": "drain", "deadline_s": 1e9}, "deadline_s"),
        ({"id": "x", "action": "drain", "force": True}, "force"),
    ],
)
def test_a_request_that_is_wrong_is_refused_by_its_field(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadOperation, match=why):
        parse(**fields)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"null",
        b"[" * 10_000,
        b'{"id": "\\ud800", "action": "drain"}',
        b'"drain"',
        b" " * (MOST_BYTES + 1),
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(BadOperation):
        parse_request(body)


def test_a_request_without_a_body_is_told_what_to_send() -> None:
    for body in (b"", b" \n"):
        with pytest.raises(BadOperation, match="no body; send JSON"):
            parse_request(body)
