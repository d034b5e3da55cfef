"""The page in a real browser, before a stand-in for a server: what it asks, shows, and asks again."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_patches.api.http_routes import page_of
from sglang_patches.front_end.routes import OWN
from tests.sglang.browser import Browser

PAGE = Path(__file__).parents[3] / "sglang_patches" / "api" / "page.html"
RANK = {"status": "ready", "in": True, "incarnation": 0, "pid": 7, "since": 1.0, "device": "cpu", "kv_tokens": 1}
RANK |= {"kv_room": 9, "requests": 0, "experts": 4, "role": "both", "room_bytes": 0}
MARGIN = {"any_ranks": 1, "ranks": [0], "repairable_ranks": 2, "hosts": ["b"]}
STATUS: dict[str, Any] = {
    **{"phase": "RUN", "epoch": 1, "active": [0, 1], "time": 50.0, "open_requests": 0, "moved_requests": 0},
    **{"delivered_tokens": 0, "draining": False, "metrics": False, "uncovered_experts": 0, "masked_experts": 0},
    **{"change": None, "margin": MARGIN, "faults_allowed": False, "operations": []},
    "ranks": {"0": {**RANK, "host": "a"}, "1": {**RANK, "host": "b"}},
}
OPERATION = {
    "id": "grow",
    "action": "scale",
    "rank": None,
    "ranks": 2,
    "role": None,
    "state": "done",
    "reason": "2 serve",
}
TEXT = "return document.getElementById(arguments[0]).textContent"
COUNTS = "return document.getElementById('experts').dataset.counts"
PRESS = """
window.confirm = text => { window.asked = text; return false };
const tile = document.querySelector('.tile[data-rank="0"]');
[...tile.querySelectorAll('button')].find(each => each.textContent === 'remove').click();
return window.asked;
"""


class Answers(BaseHTTPRequestHandler):
    status: ClassVar[dict[str, Any]] = STATUS
    experts: ClassVar[list[tuple[int, Any]]] = []
    """What is said of experts, each once, and the last for ever."""
    key: ClassVar[str] = ""
    operations: ClassVar[list[dict[str, Any]]] = [OPERATION]
    posted: ClassVar[list[str]] = []
    events: ClassVar[bytes] = b""

    def do_POST(self) -> None:
        self.posted.append(self.path)
        self._send(200, json.dumps({**OPERATION, "state": "failed", "reason": "it was cancelled"}).encode())

    def do_GET(self) -> None:
        path = self.path
        if path == "/eep/":
            self._send(200, page_of(keyed=bool(self.key)).encode(), "text/html")
        elif self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self._send(401, b"{}")
        elif path == "/eep/status":
            self._send(200, json.dumps(self.status).encode())
        elif path == "/eep/experts":
            code, told = self.experts.pop(0) if len(self.experts) > 1 else self.experts[0]
            self._send(code, json.dumps(told).encode())
        elif path == "/eep/operations":
            self._send(200, json.dumps(self.operations).encode())
        else:
            self._send(200, b"retry: 1000\n\n" + self.events, "text/event-stream")

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Answers, "experts", [(200, {"copies": [[1, 2]]})])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/eep/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def opened(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.wait_for("return document.querySelectorAll('.tile').length === 2")


def test_what_is_about_to_be_done_is_asked_with_the_number_of_the_rank(browser: Browser, page: str) -> None:
    opened(browser, page)
    assert browser.run(PRESS) == "remove rank 0?"


def test_the_copies_of_experts_are_asked_for_until_they_are_there_and_when_they_move(
    browser: Browser, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, moved = {"copies": [[1, 2]]}, {"copies": [[2, 2]]}
    answers = [(503, {"error": {"message": "no answer"}}), (200, {"copies": []}), (200, there), (200, moved)]
    monkeypatch.setattr(Answers, "experts", answers)
    opened(browser, page)
    browser.wait_for(f"{COUNTS} === '{json.dumps({'2': 2}, separators=(',', ':'))}'")


def test_several_hosts_are_named(browser: Browser, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(browser, page)
    assert "b, cpu" in browser.run("return document.querySelector('.tile[data-rank=\"1\"]').textContent")
    assert "Hosts that could go, each alone: b." in browser.run(TEXT, "margin")
    one = {number: {**rank, "host": "a"} for number, rank in STATUS["ranks"].items()}
    monkeypatch.setattr(Answers, "status", {**STATUS, "ranks": one})
    browser.wait_for("return document.getElementById('tiles').dataset.hosts === '1'")
    assert "Hosts" not in browser.run(TEXT, "margin")


def test_operations_stay_with_their_state_when_they_have_ended(browser: Browser, page: str) -> None:
    opened(browser, page)
    browser.wait_for(f"{TEXT} === 'grow: scale 2 done, 2 serve'", "operations")


def test_an_operation_that_runs_can_be_cancelled(browser: Browser, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {**OPERATION, "id": "page-1", "state": "running", "reason": "it begins"}
    monkeypatch.setattr(Answers, "operations", [OPERATION, runs])
    monkeypatch.setattr(Answers, "posted", [])
    opened(browser, page)
    browser.run("window.confirm = text => { window.asked = text; return true }")
    find = "const all = document.querySelectorAll('#operations button'); "
    press = f"{find} if (all.length === 1) {{ all[0].click(); return true }}"
    browser.wait_for(press)
    browser.wait_for(f"{TEXT} === 'scale 2: failed, it was cancelled'", "answer")
    assert browser.run("return window.asked") == "cancel scale 2, and take back what it did?"
    assert Answers.posted == ["/eep/operations/page-1/cancel"]
    asked = re.findall(r'ask\("(/eep/\w+)', PAGE.read_text())
    assert set(asked) <= {route.partition("/{")[0] for route in OWN}
    assert "/eep/operations/{ident}/cancel" in OWN


TYPE_KEY = (
    "const k = document.getElementById('key'); k.value = arguments[0]; k.dispatchEvent(new Event('change')); "
    "return true"
)


def test_a_key_is_asked_for_and_used_and_one_that_is_refused_is_not_sent_again(
    browser: Browser, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "key", "secret")
    browser.complaints()
    browser.open(page)
    browser.wait_for(f"{TEXT}.includes('wants its admin key')", "trouble")
    assert browser.complaints() == [], "nothing is asked without a key"
    browser.run(TYPE_KEY, "wrong")
    browser.wait_for(f"{TEXT}.includes('does not accept that admin key')", "trouble")
    browser.run("window.at = performance.now(); return true")
    browser.wait_for("return performance.now() > window.at + 2500")
    assert len(browser.complaints()) == 1
    browser.run(TYPE_KEY, "secret")
    browser.wait_for("return document.querySelectorAll('.tile').length === 2")
    browser.wait_for(f"{COUNTS} !== undefined && {TEXT[7:]} === ''", "trouble")
    browser.run("sessionStorage.clear(); return true")


def test_only_changes_of_the_instance_are_pauses_of_the_timeline(
    browser: Browser, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(number: int, phase: str, at: float) -> bytes:
        told = {"time": at, "phase": phase, "epoch": 1, "rank": None, "incarnation": None, "duration": None}
        return f"id: a.{number}\ndata: {json.dumps({**told, 'cause': 'because'})}\n\n".encode()

    others = ("SPARE", "KEEPER", "FORK-SERVER", "REJECTED", "MISSED")
    told = [("REVOKED", 1.0), ("AGREED", 1.1), ("RUN", 1.2), *((phase, 2.0) for phase in others)]
    monkeypatch.setattr(Answers, "events", b"".join(line(n, phase, at) for n, (phase, at) in enumerate(told)))
    opened(browser, page)
    browser.wait_for(f"return document.querySelectorAll('#events div').length >= {len(told)}")
    browser.wait_for("return document.getElementById('timeline').dataset.pauses === '1'")
