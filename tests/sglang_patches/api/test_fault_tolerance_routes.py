"""The routes of the proposed fault-tolerance API, over the operations of a stand-in for an instance."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.sglang_patches.api.served_instance import Served, run

DOWN = {"instruction": "scale_down", "params": {"removed_dp_ranks": [1]}, "request_id": "down-1"}


@pytest.fixture
def served(sglang: None, tmp_path: Path) -> Served:
    tmp_path.chmod(0o700)
    served = Served(tmp_path)
    rank = {"failures": 0, "wanted": True}
    host = served.status.host

    async def whole() -> dict[str, Any]:
        told = await host()
        return {**told, "ranks": {number: {**rank, **each} for number, each in told["ranks"].items()}}

    served.status.host = whole  # type: ignore[method-assign]
    return served


@pytest.mark.parametrize("prefix", ["/v1/fault_tolerance", "/fault_tolerance"])
def test_ranks_are_taken_out_once_and_the_status_says_when(served: Served, prefix: str) -> None:
    async def body() -> None:
        code, told = await served.ask("GET", f"{prefix}/status")
        assert (code, told["last_ft_request_id"]) == (200, "")
        assert told["engines"] == [
            {"id": 0, "status": "healthy"},
            {"id": 1, "status": "unhealthy"},
            {"id": 2, "status": "healthy"},
            {"id": 3, "status": "dead"},
        ]
        for _ in range(2):
            code, told = await served.ask("POST", f"{prefix}/apply", content=json.dumps(DOWN))
            assert (code, told) == (202, {"request_id": "down-1", "operations": ["ft:down-1:1"]})
        while (await served.ask("GET", f"{prefix}/status"))[1]["last_ft_request_id"] != "down-1":
            await asyncio.sleep(0.001)
        assert [(order.action, order.rank) for _, order in served.instance.given] == [("remove", 1)]

    run(body)


def test_what_cannot_be_done_is_refused_and_changes_nothing(served: Served) -> None:
    async def apply(client: str = "127.0.0.1", **fields: Any) -> tuple[int, Any]:
        path, body = "/v1/fault_tolerance/apply", json.dumps({**DOWN, **fields})
        return await served.ask("POST", path, client, content=body)

    async def body() -> None:
        code, told = await apply(instruction="pause")
        assert (code, "retry, scale_down" in told["error"]["message"]) == (400, True)
        assert (await apply(params={"removed_dp_ranks": [9]}))[0] == 400
        assert (await apply("10.0.0.7"))[0] == 403
        assert (await apply(instruction="retry", params={}))[0] == 202
        assert (await apply())[0] == 409
        served.status.silent = True
        assert (await apply(request_id="later"))[0] == 503
        assert (await served.ask("GET", "/fault_tolerance/status"))[0] == 503
        assert served.instance.given == []

    run(body)


@pytest.mark.parametrize("path", ["/v1/fault_tolerance/apply", "/v1/fault_tolerance/{name}"])
def test_a_route_of_the_servers_own_answers_in_place_of_ours(sglang: None, tmp_path: Path, path: str) -> None:
    fastapi: Any = importlib.import_module("fastapi")
    app = fastapi.FastAPI()

    @app.post(path)
    async def own() -> dict[str, str]:
        return {"from": "the server itself"}

    tmp_path.chmod(0o700)
    served = Served(tmp_path, app=app)

    async def body() -> None:
        assert await served.ask("POST", "/v1/fault_tolerance/apply", content=json.dumps(DOWN)) == (
            200,
            {"from": "the server itself"},
        )
        assert served.app.openapi()["paths"][path].keys() == {"post"}
        assert (await served.ask("GET", "/fault_tolerance/status"))[0] == 200, "the others are there"
        assert served.instance.given == []

    run(body)
