"""What answers at a URL may be no server, may hang, and may say anything: a command ends, and says what is wrong."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from eep import cli
from eep.console.api_client import ApiClient

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
COMMANDS = (
    ["status"],
    ["status", "--json"],
    ["scale", "4"],
    ["rank", "kill", "1"],
    ["events"],
    ["evidence", "x", "--rank", "1"],
)


@contextmanager
def answering(speak: Callable[[socket.socket], None]) -> Iterator[str]:
    """A listener that reads a request and then does ``speak``, until its peer has gone."""
    listener, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve(peer: socket.socket) -> None:
        with peer:
            try:
                peer.recv(65536)
                speak(peer)
            except OSError:
                pass  # the client has seen enough

    def accept() -> None:
        while not over.is_set():
            try:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def saying(body: bytes) -> Callable[[socket.socket], None]:
    return lambda peer: peer.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def silent(peer: socket.socket) -> None:
    while peer.recv(65536):  # until it has gone
        pass


def drip(first: bytes, more: bytes) -> Callable[[socket.socket], None]:
    def speak(peer: socket.socket) -> None:
        peer.sendall(first)
        while True:
            time.sleep(0.05)
            peer.sendall(more)

    return speak


RANK = {"status": "ready", "in": True, "incarnation": 0, "pid": 7, "failures": 0, "still_for": 0.0}
STATUS = {"phase": "RUN", "epoch": 1, "ranks": {"0": RANK}}


@pytest.mark.parametrize(
    "body",
    [
        *(b"{}", b"[1]", b"null", b'"x"', b'{"ranks": {}}', b'{"ranks": []}', b"[" * 100_000, b"\xff\xfe", b""),
        json.dumps({**STATUS, "ranks": {"a": RANK}}).encode(),
        json.dumps({**STATUS, "ranks": {"0": {**RANK, "since": 10**400}}}).encode(),
        json.dumps(
            {**STATUS, "margin": 7, "state": 1, "reason": None, "undone": "x", "reaction": [], "id": 3}
        ).encode(),
    ],
)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_answer_of_another_form_is_an_error_that_says_so(
    command: list[str], body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(saying(body)) as url:
        assert cli.main([*command, "--url", url]) == 1
    assert "is no server with EEP" in capsys.readouterr().err


@pytest.mark.parametrize(
    "speak",
    [
        silent,
        drip(HEAD + b"Content-Length: 100000\r\n\r\n{", b" "),
        drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        drip(b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    ],
    ids=["silent", "slow body", "slow chunks", "slow head"],
)
def test_an_answer_that_does_not_end_is_an_error_after_the_time_that_it_has(
    speak: Callable[[socket.socket], None],
) -> None:
    with answering(speak) as url, pytest.raises(ConnectionError, match=r"did not answer within 0.5 s"):
        ApiClient(url).get("/eep/status", within=0.5)


def test_an_operation_whose_answer_is_lost_can_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eep.console.operation_command._LONGEST_QUESTION", 0.3)
    with answering(silent) as url:
        assert cli.main(["scale", "4", "--operation", "grow-1", "--url", url]) == 1
    said = capsys.readouterr().err
    assert "did not answer within 0.3 s; the server may still do it: ask again with --operation grow-1" in said


def test_a_connection_that_is_closed_without_an_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda peer: None) as url:
        assert cli.main(["status", "--url", url]) == 1
    assert "broke off" in capsys.readouterr().err


EVIL = "red \x1b[31m\x07\u202e\nnext"


def test_a_text_from_elsewhere_does_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    told = {**STATUS, "phase": EVIL, "reason": EVIL, "ranks": {"0": {**RANK, "device": EVIL}}}
    told |= {"state": "failed", "undone": [EVIL], "reaction": EVIL}
    with answering(saying(json.dumps({**told, "ranks": told["ranks"]}).encode())) as url:
        assert cli.main(["status", "--url", url]) == 0
        assert cli.main(["scale", "4", "--url", url]) == 3
    refused = json.dumps({"error": {"message": EVIL}}).encode()
    with answering(
        lambda peer: peer.sendall(b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n" % len(refused) + refused)
    ) as url:
        assert cli.main(["status", "--url", url]) == 1
    event = {"time": 1.0, "host": EVIL, "phase": "RUN", "epoch": 3, "rank": None, "incarnation": None, "cause": EVIL}
    event |= {"evidence": "", "duration": None, "operation": "", "id": "a.1"}
    with answering(saying(json.dumps([event]).encode())) as url:
        assert cli.main(["events", "--url", url]) == 0
    said = "".join(capsys.readouterr())
    assert said.count(r"red \x1b[31m\x07\u202e\nnext") >= 5
    assert all(each.isprintable() or each == "\n" for each in said)


@pytest.mark.parametrize("change", [{"time": "now"}, {"time": 1e300}, {"rank": "x"}, {"duration": "long"}, {"host": 1}])
def test_a_line_with_values_of_other_types_is_told_as_one_that_cannot_be_read(
    change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"time": 1.0, "host": "h", "phase": "RUN", "epoch": 3, "rank": None, "incarnation": None, "cause": "c"}
    event |= {"evidence": "", "duration": None, "operation": "", **change}
    with answering(saying(json.dumps([event]).encode())) as url:
        assert cli.main(["events", "--url", url]) == 0
    assert "UNREADABLE" in capsys.readouterr().out
