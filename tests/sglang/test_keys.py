"""The real server with keys: who may ask what. Probes and the page need none."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eep.drill.sglang_server import START_WITHIN, Server
from tests.sglang.drills import check_end, wait_for

pytestmark = pytest.mark.timeout(600)

RANKS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--ep-backend", "eep")
ADMIN, CLIENT, WRONG = "the-admin", "a-client", "the-admim"
FLAGS = {
    "both keys": ("--admin-api-key", ADMIN, "--api-key", CLIENT),
    "the admin key": ("--admin-api-key", ADMIN),
    "one key for all": ("--api-key", CLIENT),
}
PRIVATE = (
    *(("GET", "/eep/status"), ("GET", "/eep/experts"), ("GET", "/eep/operations"), ("POST", "/eep/apply")),
    *(("GET", "/eep/events?follow=false"), ("POST", "/eep/evidence"), ("GET", "/v1/fault_tolerance/status")),
)
OPEN = ("/health", "/eep/ready?ranks=2", "/eep/ranks/0/live", "/eep/ranks/1/ready", "/eep/")


def code_of(server: Server, method: str, path: str, key: str | None = None, body: Any = None) -> int:
    """The status of an answer; 0 if the server does not listen yet."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except ConnectionError:
        return 0
    finally:
        connection.close()


class Start:
    """What probes said while the server started."""

    def __init__(self, server: Server) -> None:
        self.server, self.too_early = server, list[str]()

    def is_over(self) -> bool:
        """Both probes, the one of EEP first: a server that is ready stays healthy."""
        ready = code_of(self.server, "GET", "/eep/ready?ranks=2")
        healthy = code_of(self.server, "GET", "/health")
        if ready == 200 and healthy != 200:
            self.too_early.append(f"ready, and /health says {healthy}")
        return ready == healthy == 200


@pytest.fixture(
    scope="module", params=["both keys", *(pytest.param(name, marks=pytest.mark.long) for name in list(FLAGS)[1:])]
)
def started(
    request: pytest.FixtureRequest, sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Start, str]]:
    """The server, and the key that its admin routes want."""
    place = tmp_path_factory.mktemp("keys")
    server = Server(model, (*RANKS, *FLAGS[request.param]), place / "log", directory=place / "d")
    server.launch()
    try:
        start = Start(server)
        wait_for(start.is_over, "the server is ready", START_WITHIN)
        yield start, CLIENT if request.param == "one key for all" else ADMIN
    except BaseException:
        server.kill()
        raise
    server.stop()
    check_end(server)


def test_no_probe_says_that_a_server_is_ready_while_another_says_that_it_starts(started: tuple[Start, str]) -> None:
    assert started[0].too_early == []


@pytest.mark.parametrize("path", OPEN)
def test_probes_and_the_page_need_no_key(started: tuple[Start, str], path: str) -> None:
    assert code_of(started[0].server, "GET", path) == 200
    assert code_of(started[0].server, "GET", path, WRONG) == 200


@pytest.mark.parametrize(("method", "path"), PRIVATE)
def test_what_shows_or_changes_the_instance_needs_the_right_key(
    started: tuple[Start, str], method: str, path: str
) -> None:
    server, right = started[0].server, started[1]
    other = CLIENT if right == ADMIN else ADMIN
    for key in (None, WRONG, other, right + "x", right[:-1], ""):
        assert code_of(server, method, path, key) == 401, key
    assert code_of(server, method, path, right) == (400 if method == "POST" else 200), "a POST without a body is none"


def test_an_operation_is_carried_out_for_the_right_key_alone(started: tuple[Start, str]) -> None:
    server, right = started[0].server, started[1]
    assert code_of(server, "POST", "/eep/apply?wait=60", WRONG, {"id": "a", "action": "undrain"}) == 401
    assert code_of(server, "GET", "/eep/operations/a", right) == 404, "it is not known"
    assert code_of(server, "POST", "/eep/apply?wait=60", right, {"id": "a", "action": "undrain"}) == 200
