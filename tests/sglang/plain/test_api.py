"""The real server as an operator sees it over HTTP: its status, its events, operations by id, and its probes."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from eep.drill.sglang_server import Server
from tests.sglang.drills import wait_for

pytestmark = pytest.mark.timeout(300)


def ask(server: Server, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


class Reader(threading.Thread):
    """Reads the stream of events until it has seen ``phase`` of ``rank``."""

    def __init__(self, server: Server, last: str, phase: str, rank: int) -> None:
        super().__init__(daemon=True)
        self._request = urllib.request.Request(server.url + "/eep/events", headers={"Last-Event-ID": last})
        self._until = (phase, rank)
        self.ids: list[str] = []
        self.found: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=60) as stream:
            for line in stream:
                if line.startswith(b"id: "):
                    self.ids.append(line[4:].decode().strip())
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if (event["phase"], event["rank"]) == self._until:
                        self.found = event
                        return


def test_the_status_says_of_each_rank_where_it_is_and_what_it_holds(plain: Server) -> None:
    plain.generate("Say 1")
    code, status = ask(plain, "/eep/status")
    assert (code, status["phase"], sorted(status["active"])) == (200, "RUN", [0, 1, 2, 3])
    assert status["delivered_tokens"] > 0
    assert status["uncovered_experts"] == 0
    assert status["margin"]["repairable_ranks"] == 1
    for rank in status["ranks"].values():
        assert (rank["status"], rank["in"], rank["device"]) == ("ready", True, "cpu")
        assert rank["pid"] > 0
        assert rank["experts"] > 0
        assert rank["kv_room"] > 0
        assert 0 < rank["since"] <= status["time"]
    _, held = ask(plain, "/eep/experts")
    assert {count for layer in held["copies"] for count in layer} <= {1, 2, 3, 4}


def test_probes_say_how_many_ranks_are_in(plain: Server) -> None:
    plain.generate("Say 1")
    assert ask(plain, "/eep/ready?ranks=4")[0] == 200
    assert ask(plain, "/eep/ready?ranks=5")[0] == 503
    assert ask(plain, "/eep/ranks/3/live")[1]["state"] == "in"
    assert ask(plain, "/eep/ranks/3/ready")[0] == 200
    assert ask(plain, "/eep/ranks/4/live")[0] == 404


def test_ranks_are_shown_as_engines_and_one_is_taken_out_and_launched_again(plain: Server) -> None:
    path, removed = "/v1/fault_tolerance", {"removed_dp_ranks": [3]}
    down = {"instruction": "scale_down", "params": removed, "request_id": "down-3"}
    assert ask(plain, f"{path}/apply", down)[0] == 202
    wait_for(lambda: ask(plain, f"{path}/status")[1]["last_ft_request_id"] == "down-3", "the rank is removed")
    told = ask(plain, f"{path}/status")[1]
    assert (told["last_ft_failures"], told["total_engines"]) == ([], 4)
    assert [engine["status"] for engine in told["engines"]][:3] == ["healthy"] * 3
    assert ask(plain, "/eep/ranks/3/ready")[0] == 503
    assert ask(plain, "/eep/apply?wait=60", {"id": "up-3", "action": "launch", "rank": 3})[1]["state"] == "done"
    assert plain.generate("Say 1")


def test_a_rank_is_replaced_once_however_often_it_is_asked_for_and_events_tell(plain: Server) -> None:
    before = ask(plain, "/eep/events?follow=false")[1][-1]["id"]
    reader = Reader(plain, before, "READY", 2)
    lives = ask(plain, "/eep/status")[1]["ranks"]["2"]["incarnation"]
    body = {"id": "kill-2", "action": "kill", "rank": 2}
    for _ in range(2):
        code, told = ask(plain, "/eep/apply?wait=60", body)
        assert (code, told["state"]) == (200, "done"), told
    assert ask(plain, "/eep/status")[1]["ranks"]["2"]["incarnation"] == lives + 1
    reader.join(30)
    assert reader.found["incarnation"] == lives + 1
    assert before not in reader.ids
    assert ask(plain, "/eep/apply", {**body, "rank": 3})[0] == 409


def test_evidence_fences_a_rank_once_and_the_next_life_serves(plain: Server) -> None:
    lives = ask(plain, "/eep/status")[1]["ranks"]["1"]["incarnation"]
    reader = Reader(plain, ask(plain, "/eep/events?follow=false")[1][-1]["id"], "READY", 1)
    body = {"id": "e-1", "reason": "xid.79", "rank": 1, "detail": "told by a test"}
    for _ in range(2):
        assert ask(plain, "/eep/evidence", body) == (
            200,
            {"id": "e-1", "reaction": "fence", "ranks": [1], "operations": []},
        )
        reader.join(60)
        assert reader.found["incarnation"] == lives + 1
    assert ask(plain, "/eep/evidence", {**body, "rank": 9})[0] == 404
    assert ask(plain, "/eep/evidence", {**body, "detail": "\x1b"})[0] == 400
    assert ask(plain, "/eep/apply?wait=60", {"id": "settled-1", "action": "launch", "rank": 1})[1]["state"] == "done"
    assert ask(plain, "/eep/status")[1]["ranks"]["1"]["incarnation"] == lives + 1
    assert plain.generate("Say 1")


def test_a_server_that_drains_accepts_no_request_until_it_is_told_otherwise(plain: Server) -> None:
    assert ask(plain, "/eep/apply?wait=60", {"id": "drain-1", "action": "drain"})[1]["state"] == "done"
    try:
        code, told = ask(plain, "/generate", {"text": "Say 1"})
        assert (code, "drains" in str(told)) == (503, True)
        code, told = ask(plain, "/generate", {"text": "Say 1", "stream": True})
        assert (code, "drains" in str(told)) == (503, True), "a router tries again only where the status says so"
        assert ask(plain, "/eep/ready")[0] == 503
    finally:
        assert ask(plain, "/eep/apply?wait=60", {"id": "undrain-1", "action": "undrain"})[1]["state"] == "done"
    assert plain.generate("Say 1")


def test_what_cannot_be_done_is_refused_at_once(plain: Server) -> None:
    assert ask(plain, "/eep/apply", {"id": "too-few", "action": "scale", "ranks": 2})[1]["state"] == "failed"
    assert ask(plain, "/eep/apply", {"id": "too-many", "action": "scale", "ranks": 5})[1]["state"] == "failed"
    assert ask(plain, "/eep/apply", {"id": "no-rank", "action": "remove"})[0] == 400
    assert sorted(ask(plain, "/eep/status")[1]["active"]) == [0, 1, 2, 3]


def test_the_servers_own_description_shows_the_routes(plain: Server) -> None:
    _, schema = ask(plain, "/openapi.json")
    assert {"/eep/status", "/eep/apply", "/eep/events"} <= schema["paths"].keys()
