"""The client of the HTTP API against a small server, and the commands that use it."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from eep import cli
from eep.console.api_client import ApiClient, ApiError
from eep.console.server_choice import ServerChoice
from tests.console.server_stand_in import LINE, Routes
from tests.console.test_status_table import STATUS


def test_a_refusal_is_an_error_with_the_text_of_the_server(url: str) -> None:
    with pytest.raises(ApiError, match="no such thing") as refused:
        ApiClient(url, "secret").get("/eep/nothing")
    assert refused.value.status == 404
    with pytest.raises(ApiError, match="EEP_ADMIN_KEY"):
        ApiClient(url).get("/eep/status")
    with pytest.raises(ConnectionError, match="no server answers"):
        ApiClient("http://127.0.0.1:1").get("/eep/status")


def test_status_by_url_is_a_table_and_json_for_programs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", url]) == 0
    assert "1 of 3 ranks in" in capsys.readouterr().out
    assert cli.main(["status", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_events_by_url_are_those_of_the_log(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["events", "--url", url]) == 0
    assert "epoch 3 RUN: because" in capsys.readouterr().out
    assert cli.main(["events", "--url", url, "--json"]) == 0
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


def test_a_key_that_cannot_be_sent_or_read_is_not_shown(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="look at its file") as refused:
        ApiClient(url, "one\ntwo")
    assert "two" not in str(refused.value)
    with pytest.raises(ValueError, match="--key-file ") as unread:
        ServerChoice.of(cli._parser().parse_args(["status", "--url", url, "--key-file", str(tmp_path / "none")]))
    assert "cannot be read" in str(unread.value)


def test_evidence_is_told_with_what_was_given(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evidence", "xid.79", "--device", "GPU-a", "--id", "e-1", "--detail", "in dmesg", "--url", url]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == "fence: ranks 2, 3\n"
    _, body, _ = Routes.asked[-1]
    assert body == {"id": "e-1", "reason": "xid.79", "device": "GPU-a", "severity": "warning", "detail": "in dmesg"}


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "localhost:30000",
            "http://h:abc",
            "http://h:99999",
            "http://h:0",
            "http://h 1:30000",
            "http://",
            "http://[::1",
        ),
        *("ftp://h", "http://h\n:1", "http://key@h:30000", "http://h:30000/?a=b"),
    ],
)
def test_what_is_no_url_is_an_error_that_says_how_to_write_it(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", wrong]) == 1
    assert "write it like http://127.0.0.1:30000" in capsys.readouterr().err


def test_neither_a_proxy_nor_another_place_gets_the_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert ApiClient(url, "secret").get("/eep/status", within=5.0) == STATUS
    with pytest.raises(ApiError, match="if you trust it") as refused:
        ApiClient(url, "secret").get("/elsewhere")
    assert refused.value.status == 302


def test_what_speaks_no_http_or_no_json_is_no_server(url: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0\r\n\r\n"), daemon=True).start()
        with pytest.raises(ConnectionError, match="broke off"):
            ApiClient(f"http://127.0.0.1:{other.getsockname()[1]}").get("/eep/status")
    with pytest.raises(ConnectionError, match="no server with EEP"):
        ApiClient(url, "secret").get("/plain")


@pytest.mark.parametrize(
    "command", [["rank", "kill"], ["rank", "remove"], ["evidence", "xid.79", "--rank"], ["fault", "kill"]]
)
@pytest.mark.parametrize("number", ["-1", "70000", "x", "1e3", "٣"])
def test_what_is_no_rank_is_refused_before_anyone_is_asked(
    command: list[str], number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, number, "--dir", "/nowhere"])
    assert ended.value.code == 2
    assert "give a number from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["scale", "4", "--operation", "a b"], ["drain", "--operation", "x" * 65]],
)
def test_what_is_no_operation_is_refused_before_anyone_is_asked(
    url: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--url", url]) == 1
    assert "this is no operation" in capsys.readouterr().err
    assert Routes.asked == []


@pytest.mark.parametrize(
    "words",
    [
        *(["scale", "0"], ["scale", "4.5"], ["scale", "70000"], ["drain", "--within", "-1"]),
        *(["drain", "--within", "nan"], ["drain", "--within", "3601"], ["status", "--watch", "-1"]),
        *(["status", "--watch", "0"], ["status", "--watch", "inf"], ["status", "--watch", "soon"]),
    ],
    ids=" ".join,
)
def test_a_number_that_cannot_be_is_a_wrong_command_line(
    url: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--url", url])
    assert ended.value.code == 2
    assert repr(words[-1]) in capsys.readouterr().err
    assert Routes.asked == []


def test_a_key_that_is_refused_is_not_called_missing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError, match="does not accept the key"):
        ApiClient(url, "wrong").get("/eep/status")


def test_an_operation_that_has_not_ended_has_an_exit_code_of_its_own(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Routes, "states", ["running"])
    monkeypatch.setattr("eep.console.operation_command._MORE_THAN_ITS_DEADLINE_S", 0.0)
    assert cli.main(["drain", "--within", "0.01", "--url", url]) == 4
    assert capsys.readouterr().out.splitlines()[-1] == "running: 6 ranks serve"


def test_requests_are_accepted_again_by_name(url: str) -> None:
    assert cli.main(["undrain", "--url", url]) == 0
    assert Routes.asked[-1][1]["action"] == "undrain"
