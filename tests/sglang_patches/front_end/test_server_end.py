"""How long a server that ends waits, and what clients and probes are told meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patches import options
from sglang_patches.front_end import server_end, tokenizer_hooks
from sglang_patches.front_end.readiness import ReadinessGate
from sglang_patches.server import resignation
from tests.sglang_patches.front_end.front_end_server import Server


def answer_of(
    path: str, ending: str | None = None, not_ready: str | None = None, drains: str | None = None
) -> tuple[int, str]:
    """The status, and the message of an error. SGLang answers 200 behind the gate."""
    sent: list[Any] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        raise AssertionError("no body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    gate = ReadinessGate(behind, lambda: ending, lambda: not_ready, why_drains=lambda: drains)
    asyncio.run(gate({"type": "http", "path": path}, receive, send))
    body = json.loads(sent[1]["body"])["error"]["message"] if len(sent) > 1 else ""
    return sent[0]["status"], body


def test_a_server_without_ranks_is_alive_and_not_ready() -> None:
    assert answer_of("/health", not_ready="no rank is in") == (200, "")
    assert answer_of("/health_generate", not_ready="no rank is in") == (503, "no rank is in")
    assert answer_of("/generate", not_ready="no rank is in") == (200, ""), "requests wait"
    assert answer_of("/health_generate") == (200, "")


def test_a_probe_is_answered_when_the_ranks_go_while_it_waits() -> None:
    sent: list[Any] = []
    reasons: list[str] = []

    async def probe() -> None:
        over = asyncio.Event()

        async def behind(scope: Any, receive: Any, send: Any) -> None:
            reasons.append("no rank is in")
            await over.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Any) -> None:
            sent.append(message)

        gate = ReadinessGate(behind, lambda: None, lambda: reasons[0] if reasons else None)
        await gate({"type": "http", "path": "/health_generate"}, behind, send)
        over.set()
        while gate._asking:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(probe(), 30))
    assert [message.get("status") for message in sent] == [503, None], "and SGLang's late answer goes nowhere"


@pytest.mark.parametrize("path", ["/generate", "/health", "/health_generate"])
def test_a_server_that_ends_takes_no_requests(path: str) -> None:
    status, said = answer_of(path, ending="it was told to")
    assert (status, said) == (503, "the server ends: it was told to; try again")
    assert answer_of("/metrics", ending="it was told to")[0] == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_server_that_drains_says_so_by_the_status(path: str) -> None:
    """Of a stream, too: SGLang behind the gate answers 200, and says later that it refuses."""
    assert answer_of(path, drains="the server drains") == (503, "the server drains")


@pytest.mark.parametrize("path", ["/health", "/metrics", "/eep/apply", "/v1/models", "/abort_request"])
def test_a_server_that_drains_answers_what_is_not_for_the_model(path: str) -> None:
    assert answer_of(path, drains="the server drains") == (200, "")


class Manager:
    """SGLang's TokenizerManager, as far as its end goes."""

    def __init__(self, server: Server, requests: list[str]) -> None:
        self.gracefully_exit = False
        self.server = server
        self.rid_to_state = dict.fromkeys(requests)
        self.left: list[str] | None = None
        setattr(self, tokenizer_hooks._ATTRIBUTE, server.front_end)

    async def sigterm_watchdog(self) -> None:
        self.left = list(self.rid_to_state)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """With two requests that no rank serves."""
    monkeypatch.setenv(options.DIRECTORY, str(tmp_path))
    monkeypatch.setenv(options.DRAIN_LIMIT, "0.3")
    monkeypatch.setattr(server_end, "_end", server_end.ServerEnd())
    monkeypatch.setattr(server_end.threading, "Timer", lambda *_: SimpleNamespace(start=lambda: None))
    server = Server()
    server.accept("a")
    server.accept("b")
    return Manager(server, ["a", "b", "HEALTH_CHECK_1"])


def run_to_the_end(manager: Manager) -> None:
    async def run() -> None:
        await asyncio.wait_for(server_end._end_in_time(Manager.sigterm_watchdog, manager), 30)

    asyncio.run(run())


def test_requests_that_are_not_done_in_time_are_ended_with_503(manager: Manager) -> None:
    manager.gracefully_exit = True
    run_to_the_end(manager)
    assert {request: reason["status_code"] for request, reason in manager.server.answered} == {"a": 503, "b": 503}
    assert manager.left == [], "SGLang waits for none of them"
    assert len(manager.server.front_end.ledger) == 0
    assert not server_end._end.resigned


def test_a_server_that_resigns_tells_its_clients_why(manager: Manager, tmp_path: Path) -> None:
    resignation.announce(tmp_path, "rank 0 failed")
    run_to_the_end(manager)
    assert manager.gracefully_exit
    assert [reason["message"] for _, reason in manager.server.answered] == [
        "the server ends: rank 0 failed; try again"
    ] * 2
    assert server_end._end.resigned


def test_a_server_that_sglang_says_starts_is_not_ready(manager: Any) -> None:
    manager.server.view(1, r0=0, r1=0, r2=0)
    manager.server.front_end.service.seen(3, True, 0.0)
    manager.server_status = SimpleNamespace(name="Starting")
    assert "starting" in str(server_end.why_not_ready(manager))
    manager.server_status = SimpleNamespace(name="Up")
    assert server_end.why_not_ready(manager) is None
