"""How a real server ends: told to, in whatever state it is, and by itself once its ranks are given up."""

from __future__ import annotations

import glob
import http.client
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from eep.control.wire.sealed_frames import WireError
from eep.drill.faults import Target
from eep.drill.sglang_server import Server
from tests.sglang import server_processes as processes
from tests.sglang.drills import RANK_STARTS, wait_for

pytestmark = pytest.mark.timeout(900)

TWO_RANKS = (
    *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--ep-backend", "eep"),
    *("--eep-timeout-ms", "20000"),
)
ENDS_WITHIN = 20.0
"""Twice what is promised: other tests may keep the machine busy."""
ENDS = "the server ends"


class EndingServer(Server):
    """A server that a test ends."""

    def tell_to_end(self) -> int:
        """The status with which it ended."""
        self._process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self, within: float = ENDS_WITHIN) -> int:
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end within {within:g} s\n{self.log[-4000:]}") from None

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        assert self.directory is not None
        return [known.pid for known in Target(self.directory).ranks().values() if known.pid is not None]

    def status_of(self, path: str, body: object = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextmanager
def serving(model: Path, place: Path, *flags: str, **environment: str) -> Iterator[EndingServer]:
    """With two ranks."""
    server = EndingServer(model, (*TWO_RANKS, *flags), place / "log", environment, directory=place / "d")
    server.__enter__()
    try:
        yield server
    finally:
        if server._process.poll() is None:
            server.kill()


def listed_for_sweep(server: Server) -> Callable[[], list[str]]:
    """Which files there are in shared memory that the server is to remove at its end."""
    assert server.directory is not None
    patterns = (server.directory / "sweep").read_text().split()
    assert patterns
    return lambda: [path for pattern in patterns for path in glob.glob(pattern)]


@contextmanager
def open_stream(server: Server) -> Iterator[http.client.HTTPResponse]:
    """A request of which the client has the first token."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    sampling = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0}
    body = {"text": "A long answer", "stream": True, "sampling_params": sampling}
    try:
        connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
        yield answer
    finally:
        connection.close()


def check_that_it_ends_while_processes_hang(server: EndingServer, and_the_controller: bool) -> None:
    """When it is told to. Both ranks hang."""
    with open_stream(server) as stream, ThreadPoolExecutor(1) as client:
        hanging = server.ranks()
        assert len(hanging) == 2
        controller = processes.process_of(server, processes.CONTROLLER)
        assert controller is not None
        for pid in [*hanging, controller] if and_the_controller else hanging:
            os.kill(pid, signal.SIGSTOP)
        waits = client.submit(server.status_of, "/generate", {"text": "Say 1", "sampling_params": {}})
        server.tell_to_end()
        assert ENDS in stream.read().decode(), "the stream ends with the reason"
        status, said = waits.result()
        assert (status, ENDS in said) == (503, True), said
        assert server.leftovers() == []


@pytest.mark.long  # in CI one ends whose controller hangs too, in tests/sglang/test_spares.py
def test_a_server_whose_ranks_hang_ends_when_it_is_told_to(sglang: None, model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server:
        check_that_it_ends_while_processes_hang(server, and_the_controller=False)


@pytest.mark.long
def test_a_server_ends_when_it_is_told_to_while_its_ranks_start(sglang: None, model: Path, tmp_path: Path) -> None:
    server = EndingServer(model, TWO_RANKS, tmp_path / "log", directory=tmp_path / "d")
    server.launch()
    try:
        wait_for(lambda: RANK_STARTS in server.log, "a rank starts")
        files = listed_for_sweep(server)
        wait_for(files, "a rank has its file in shared memory")
        server.tell_to_end()
        assert server.leftovers() == []
        assert files() == []
        assert not (tmp_path / "d").exists()
    finally:
        server.kill()


@pytest.mark.long
@pytest.mark.parametrize("kind", [processes.MAIN, processes.CONTROLLER, processes.FORK_SERVER])
def test_nothing_is_left_when_a_process_is_killed_that_the_server_cannot_do_without(
    sglang: None, model: Path, tmp_path: Path, kind: str
) -> None:
    with serving(model, tmp_path) as server:
        files = listed_for_sweep(server)
        assert files()
        processes.kill(server, kind)
        server.ended()
        assert server.leftovers(ENDS_WITHIN) == []
        wait_for(lambda: not (tmp_path / "d").exists(), "the directory is removed", ENDS_WITHIN)
        assert files() == []


def test_a_server_that_recovers_is_alive_and_not_ready_and_ends_once_its_ranks_are_given_up(
    sglang: None, model: Path, tmp_path: Path
) -> None:
    with serving(model, tmp_path, EEP_RELAUNCH_LIMIT="1") as server, ThreadPoolExecutor(1) as client:
        wait_for(lambda: server.status_of("/health_generate")[0] == 200, "the server is ready")
        for pid in server.ranks():
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: "no rank is in" in server.status_of("/health_generate")[1], "the server is not ready")
        assert server.status_of("/health")[0] == 200
        waits = client.submit(server.status_of, "/generate", {"text": "Say 1", "sampling_params": {}})

        def kill_again() -> bool:
            with suppress(OSError, WireError):  # the server ends
                for pid in server.ranks():
                    os.kill(pid, signal.SIGKILL)
            return f"{ENDS}: ranks 0, 1 failed more than 1 times in a row" in server.log

        wait_for(kill_again, "the server gives up")
        assert server.ended() == 1
        assert waits.result()[0] == 503
        assert server.leftovers() == []
