"""The client of the HTTP API against a small server, and the commands that use it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from eep import cli
from eep.console.api_client import ApiClient, ApiError, read_url
from tests.console.test_status_table import STATUS

LINE = {"time": 1.0, "host": "h", "phase": "RUN", "epoch": 3, "rank": None, "incarnation": None, "cause": "because"}
LINE |= {"evidence": "", "duration": None, "operation": "view-3"}
OPERATION = {"reason": "6 ranks serve", "undone": []}


class Routes(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, Any, str | None]]] = []
    states: ClassVar[list[str]] = ["running", "done"]

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.asked.append((self.path, body, self.headers.get("Authorization")))
        if self.headers.get("Authorization") != "Bearer secret":
            self._send(401, b'{"error": "Unauthorized"}')
        elif self.path == "/eep/status":
            self._send(200, json.dumps(STATUS).encode())
        elif self.path.startswith("/eep/apply"):
            state = self.states[0] if len(self.states) == 1 else self.states.pop(0)
            self._send(200, json.dumps({"state": state, **OPERATION}).encode())
        elif self.path.startswith("/eep/events?follow"):
            self._send(200, json.dumps([{"id": "x.1", **LINE}]).encode())
        elif self.path.startswith("/eep/events"):
            self._send(200, f"retry: 1000\n\nid: x.1\ndata: {json.dumps(LINE)}\n\n: \n\n".encode())
        else:
            self._send(404, b'{"error": {"message": "there is no such thing"}}')

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("EEP_ADMIN_KEY", "secret")
    monkeypatch.setattr(Routes, "asked", [])
    monkeypatch.setattr(Routes, "states", ["running", "done"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_refusal_is_an_error_with_the_text_of_the_server(url: str) -> None:
    with pytest.raises(ApiError, match="no such thing") as refused:
        ApiClient(url, "secret").get("/eep/nothing")
    assert refused.value.status == 404
    with pytest.raises(ApiError, match="EEP_ADMIN_KEY"):
        ApiClient(url).get("/eep/status")
    with pytest.raises(ConnectionError, match="no server answers"):
        ApiClient("http://127.0.0.1:1").get("/eep/status")
    with pytest.raises(ValueError, match="write it like"):
        ApiClient("localhost:30000")


def test_events_come_with_their_ids(url: str) -> None:
    assert [(ident, json.loads(line)["epoch"]) for ident, line in ApiClient(url, "secret").events("")] == [("x.1", 3)]


def test_status_by_url_is_a_table_and_json_for_programs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", url]) == 0
    assert "1 of 3 ranks in" in capsys.readouterr().out
    assert cli.main(["status", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


@pytest.mark.parametrize("more", [[], ["--follow"]])
def test_events_by_url_are_those_of_the_log(url: str, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["events", "--url", url, *more]) == 0
    assert "epoch 3 RUN: because" in capsys.readouterr().out
    assert cli.main(["events", "--url", url, "--json", *more]) == 0
    assert json.loads(capsys.readouterr().out) == LINE


def test_an_operation_is_asked_for_until_it_has_ended_under_one_id(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["scale", "6", "--url", url]) == 0
    assert capsys.readouterr().out.splitlines() == ["running: 6 ranks serve", "done: 6 ranks serve"]
    bodies = [body for _, body, _ in Routes.asked]
    assert bodies[0] == bodies[1]
    assert (bodies[0]["action"], bodies[0]["ranks"]) == ("scale", 6)


def test_an_operation_that_fails_has_an_exit_code_of_its_own(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Routes, "states", ["failed"])
    assert cli.main(["drain", "--url", url]) == 3
    assert cli.main(["rank", "remove", "2", "--url", url]) == 3


def test_a_key_is_read_from_a_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EEP_ADMIN_KEY")
    assert cli.main(["status", "--url", url]) == 1
    (tmp_path / "key").write_text("secret\n")
    assert cli.main(["status", "--url", url, "--key-file", str(tmp_path / "key")]) == 0


def test_a_directory_says_where_its_server_is(tmp_path: Path) -> None:
    assert read_url(tmp_path) is None
    (tmp_path / "url").write_text("http://127.0.0.1:30000\n")
    assert read_url(tmp_path) == "http://127.0.0.1:30000"
