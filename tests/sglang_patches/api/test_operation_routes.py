"""Operations and evidence over HTTP: what the routes translate, and what they refuse."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from eep.operations.operation_request import MOST_BYTES
from eep.operations.operation_runner import OrderRefused
from eep.operations.operation_table import TooManyOperations
from sglang_patches.front_end import server_end
from tests.sglang_patches.api.served_instance import Served, run


def test_an_operation_is_carried_out_once_and_told(served: Served) -> None:
    async def body() -> None:
        code, told = await served.apply(id="a", action="launch", rank=4, path="/eep/apply?wait=10")
        assert (code, told["state"], told["orders"]) == (200, "done", ["launch 4"])
        assert (await served.apply(id="a", action="launch", rank=4))[1]["state"] == "done"
        assert len(served.instance.given) == 1
        assert (await served.ask("GET", "/eep/operations/a"))[1]["state"] == "done"
        assert [each["id"] for each in (await served.ask("GET", "/eep/operations"))[1]] == ["a"]
        assert (await served.ask("GET", "/eep/operations/b"))[0] == 404

    run(body)


def test_what_is_no_operation_is_refused_and_changes_nothing(served: Served) -> None:
    async def body() -> None:
        await served.apply(id="a", action="drain")
        assert (await served.apply(id="a", action="undrain"))[0] == 409
        assert (await served.apply(id="b", action="remove"))[0] == 400
        assert (await served.ask("POST", "/eep/apply", content=b"x" * (MOST_BYTES + 1)))[0] == 400
        code, told = await served.apply(id="c", action="scale", ranks=99)
        assert (code, told["state"]) == (200, "failed"), "a refusal is in the first answer"
        assert len(served.instance.given) == 1

    run(body)


def test_too_many_operations_are_told_to_come_again(served: Served) -> None:
    served.instance.silent = 10**9

    async def body() -> None:
        asked = [served.apply(id=f"o{number}", action="undrain") for number in range(17)]
        codes = sorted(code for code, _ in await asyncio.gather(*asked))
        assert codes == [202] * 16 + [429]

    run(body)


def test_an_operation_is_cancelled_and_taken_back(served: Served) -> None:
    served.instance.slow = (3,)

    async def body() -> None:
        code, told = await served.apply(id="a", action="scale", ranks=3)
        assert (code, told["state"]) == (202, "running")
        assert (await served.apply(id="b", action="scale", ranks=5))[0] == 202
        code, told = await served.ask("POST", "/eep/operations/b/cancel")
        assert (code, told["state"], told["reason"]) == (200, "failed", "it was cancelled")
        code, told = await served.ask("POST", "/eep/operations/a/cancel")
        assert (code, told["state"]) == (202, "running"), "it is still taken back"
        served.instance.settle(3)
        while (await served.ask("GET", "/eep/operations/a"))[0] == 202:
            await asyncio.sleep(0.01)
        assert (await served.ask("GET", "/eep/operations/a"))[1]["undone"] == ["launch 3"]
        assert (await served.ask("POST", "/eep/operations/a/cancel"))[0] == 200, "it has ended"
        assert (await served.ask("POST", "/eep/operations/none/cancel"))[0] == 404
        assert (await served.ask("POST", "/eep/operations/a/cancel", "10.0.0.7"))[0] == 403

    run(body)


def test_refusals_say_whether_and_when_to_ask_again(served: Served) -> None:
    served.instance.silent = 10**9

    async def refused(method: str, path: str, **named: Any) -> tuple[int, bool, str | None]:
        async with served._client("127.0.0.1") as session:
            answer = await session.request(method, path, **named)
        return answer.status_code, answer.json()["error"]["retry"], answer.headers.get("retry-after")

    async def body() -> None:
        await asyncio.gather(*(served.apply(id=f"o{number}", action="kill", rank=1) for number in range(16)))
        another = json.dumps({"id": "o1", "action": "kill", "rank": 2})
        assert await refused("POST", "/eep/apply", content=another) == (409, False, None)
        more = json.dumps({"id": "more", "action": "kill", "rank": 2})
        assert await refused("POST", "/eep/apply", content=more) == (429, True, "1")
        assert await refused("POST", "/eep/apply?wait=nan", content=more) == (400, False, None)
        assert await refused("GET", "/eep/events?follow=maybe") == (400, False, None)
        assert await refused("GET", f"/eep/events?after={'x' * 65}") == (400, False, None)
        served.status.silent = True
        assert await refused("GET", "/eep/status") == (503, True, "1")

    run(body)


def test_a_server_that_ends_begins_nothing_and_keeps_nobody_waiting(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.instance.silent = 10**9

    async def body() -> None:
        waits = asyncio.ensure_future(served.apply(id="a", action="drain", path="/eep/apply?wait=60"))
        while served.api.runner.table.get("a") is None:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(server_end, "why_ending", lambda: "it was told to (SIGTERM)")
        assert (await waits)[0] == 202
        code, told = await served.apply(id="b", action="undrain")
        assert (code, told["error"]["message"]) == (503, "the server ends: it was told to (SIGTERM)")
        assert served.api.runner.table.get("b") is None

    run(body)


def test_many_who_ask_for_the_same_at_once_get_one_operation(served: Served) -> None:
    async def body() -> None:
        asked = [served.apply(id="a", action="kill", rank=1, deadline_s=10 + number) for number in range(32)]
        answers = await asyncio.gather(*asked)
        assert {code for code, _ in answers} <= {200, 202}, "accepted, or over already"
        assert len({told["accepted_at"] for _, told in answers}) == 1
        assert len(served.instance.given) == 1

    run(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b'{"id": "a", "action": "drain", "deadline_s": NaN}',
        b'{"id": "a", "action": "drain", "deadline_s": 1e999}',
        b'{"id": "..", "action": "drain"}',
        b'{"id": "a", "action": "explode"}',
        b'{"id": "a", "action": "scale", "ranks": 123456789012345678901234567890}',
        b'{"id": "a", "action": "kill", "rank": "1"}',
        b"[" * 10_000,
    ],
)
def test_nonsense_is_refused_with_a_text_and_begins_nothing(served: Served, body: bytes) -> None:
    async def ask() -> None:
        code, told = await served.ask("POST", "/eep/apply", content=body)
        assert code == 400
        assert told["error"]["message"].startswith("this is no operation" if body else "the request has no body")
        assert served.api.runner.table.newest(9) == []

    run(ask)


@pytest.mark.parametrize("ident", ["%00", "%ff", "a%20b", "x" * 5000, "%F0%9F%92%A5"])
def test_an_operation_with_a_strange_id_is_not_known(served: Served, ident: str) -> None:
    async def body() -> None:
        code, _ = await served.ask("GET", f"/eep/operations/{ident}")
        assert code == 404

    run(body)


def test_evidence_is_heard_and_what_is_none_is_refused(served: Served, tmp_path: Path) -> None:
    async def tell(client: str = "127.0.0.1", **fields: Any) -> tuple[int, Any]:
        return await served.ask("POST", "/eep/evidence", client, content=json.dumps(fields))

    async def body() -> None:
        assert (await tell("10.0.0.7", id="e", reason="xid.79", rank=1))[0] == 403
        assert (await tell(id="e", reason="xid.79"))[0] == 400
        assert (await tell(id="e", reason="xid.79", rank=7))[0] == 404
        assert (await served.ask("POST", "/eep/evidence", content=b"x" * (MOST_BYTES + 1)))[0] == 400
        assert served.desk.heard == []
        code, told = await tell(id="e", reason="xid.79", rank=1)
        assert (code, told["reaction"]) == (200, "fence")
        for error, code in ((OrderRefused("no"), 409), (TooManyOperations("many"), 429), (OSError("gone"), 503)):
            served.desk.fails = error
            assert (await tell(id="e", reason="xid.79", rank=1))[0] == code
        assert len(served.desk.heard) == 1

    run(body)
