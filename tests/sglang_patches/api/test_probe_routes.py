"""The probes of orchestrators: which ranks are alive, and whether the server is ready."""

from __future__ import annotations

import pytest

from sglang_patches.front_end import server_end
from tests.sglang_patches.api.served_instance import Served, run


def test_a_rank_that_starts_is_alive_and_not_ready(served: Served) -> None:
    async def body() -> None:
        code, told = await served.ask("GET", "/eep/ranks/0/live")
        assert (code, told["state"], told["incarnation"]) == (200, "in", 2)
        assert (await served.ask("GET", "/eep/ranks/0/ready"))[0] == 200
        code, told = await served.ask("GET", "/eep/ranks/1/live")
        assert (code, told["state"]) == (200, "starting")
        code, told = await served.ask("GET", "/eep/ranks/1/ready")
        assert (code, told["error"]["message"]) == (503, "rank 1 is starting")

    run(body)


def test_a_rank_that_stands_still_or_is_gone_is_not_alive(served: Served) -> None:
    async def body() -> None:
        code, told = await served.ask("GET", "/eep/ranks/2/live?still_s=20")
        assert (code, told["error"]["message"]) == (503, "rank 2 is in, and has stood still for 25 s")
        assert (await served.ask("GET", "/eep/ranks/2/live"))[0] == 200
        code, told = await served.ask("GET", "/eep/ranks/3/live")
        assert (code, told["error"]["message"]) == (503, "rank 3 is down: it has no process")
        assert (await served.ask("GET", "/eep/ranks/2/live?still_s=0"))[0] == 400
        assert (await served.ask("GET", "/eep/ranks/7/live"))[0] == 404
        assert (await served.ask("GET", "/eep/ranks/7/ready"))[0] == 404
        served.status.silent = True
        assert (await served.ask("GET", "/eep/ranks/0/live"))[0] == 503
        assert (await served.ask("GET", "/eep/status"))[0] == 503

    run(body)


def test_readiness_is_what_the_front_end_says(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        server_end, "why_not_ready", lambda _, ranks, unknown: None if ranks < 3 else f"2 of {ranks} ranks are in"
    )

    async def body() -> None:
        assert (await served.ask("GET", "/eep/ready?ranks=2"))[0] == 200
        code, told = await served.ask("GET", "/eep/ready?ranks=3")
        assert (code, told["error"]["message"]) == (503, "2 of 3 ranks are in")
        for wrong in ("0", "-1", "1.5", "nan", "1e999", "x", "", "9" * 500):
            assert (await served.ask("GET", f"/eep/ready?ranks={wrong}"))[0] == 400, wrong

    run(body)
