"""``eep scale`` and ``eep rank``: over HTTP where the server of a directory answers, and by its supervisor otherwise."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eep import cli
from eep.control.supervisor.supervisor import Supervisor
from eep.membership import RankStatus
from tests.console.server_stand_in import OPERATION, Routes
from tests.control import ranks
from tests.control.harness import ROOT, patient_policy, record, runs_with, supervised, until
from tests.control.test_cli import Operator, beside_two_ranks


class OperationRoutes:
    """Answers for :class:`Routes`: an operation runs until it is cancelled."""

    @staticmethod
    def answer(routes: Any, body: Any) -> None:
        Routes.asked.append((routes.path, body, routes.headers.get("Authorization")))
        if routes.headers.get("Authorization") != "Bearer secret":
            routes._send(401, b'{"error": "Unauthorized"}')
        elif routes.path == "/eep/operations":
            routes._send(200, b"[]")
        elif routes.path.endswith("/cancel"):
            told = {"state": "failed", "reason": "it was cancelled", "undone": ["remove 4"]}
            routes._send(200, json.dumps(told).encode())
        else:
            told = {**OPERATION, "state": Routes.states[0], "reason": "0 of 6 ranks serve"}
            routes._send(200, json.dumps(told).encode())


@pytest.fixture
def served(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a server that serves HTTP, with its own key."""
    monkeypatch.setattr(Routes, "_answer", OperationRoutes.answer)
    monkeypatch.delenv("EEP_ADMIN_KEY")
    tmp_path.chmod(0o700)
    (tmp_path / "url").write_text(url)
    (tmp_path / "token").write_text("secret")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [("scale", "6"), ("rank", "kill", "1"), ("rank", "kill", "1", "--wait"), ("rank", "replace", "1"), ("drain",)],
)
def test_the_server_does_it_where_it_answers(served: Path, words: tuple[str, ...]) -> None:
    Routes.states = ["done"]
    assert cli.main([*words, "--dir", str(served), "--operation", "x"]) == 0
    path, body, _ = Routes.asked[-1]
    assert path.startswith("/eep/apply?wait=")
    assert (body["id"], body["action"]) == ("x", words[1] if words[0] == "rank" else words[0])


def test_without_waiting_an_operation_is_only_asked_for(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Routes.states = ["running"]
    assert cli.main(["rank", "launch", "4", "--dir", str(served), "--operation", "x"]) == 0
    assert capsys.readouterr().out == "running: 0 of 6 ranks serve; operation x\n"
    Routes.states = ["failed"]
    assert cli.main(["rank", "launch", "4", "--dir", str(served)]) == 3


def test_a_server_that_wants_another_key_is_not_passed_by(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (served / "token").write_text("of another life")
    assert cli.main(["scale", "6", "--dir", str(served)]) == 1
    assert "EEP_ADMIN_KEY" in capsys.readouterr().err


async def interrupted(words: tuple[str, ...], says: bytes) -> tuple[int, bytes]:
    """Types a command, and Ctrl-C when it has said something. Its exit code and what it said after that."""
    command = (sys.executable, "-m", "eep.cli", *words)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    while says not in (line := await process.stdout.readline()):
        assert line, "it ended before"
    process.send_signal(signal.SIGINT)
    rest = await process.stdout.read()
    return await process.wait(), rest


def test_ctrl_c_has_the_server_take_it_back(served: Path) -> None:
    Routes.states = ["running"]
    words = ("scale", "6", "--dir", str(served), "--operation", "x")
    code, said = asyncio.run(asyncio.wait_for(interrupted(words, b"running"), 60))
    assert (code, said) == (130, b"failed: it was cancelled\ntaken back: remove 4\n")
    assert Routes.asked[-1][0] == "/eep/operations/x/cancel"


def test_ctrl_c_takes_back_what_the_command_did_itself() -> None:
    async def body() -> None:
        async with supervised(ranks.never_ready, 2, policy=patient_policy(2, leave_grace=0.5)) as supervisor:
            directory = str(supervisor.directory.path)
            await until(supervisor, lambda: supervisor.state.ranks[1].status is RankStatus.STARTING)
            assert await asyncio.to_thread(cli.main, ["rank", "remove", "1", "--dir", directory]) == 0
            await until(supervisor, lambda: supervisor.state.ranks[1].status is RankStatus.DOWN)
            words = ("rank", "launch", "1", "--wait", "--dir", directory)
            code, said = await interrupted(words, b"rank 1 is starting")
            assert code == 130
            assert said.splitlines()[-2:] == [b"failed: it was cancelled", b"taken back: remove 1"]
            assert supervisor.state.ranks[1].status is RankStatus.DOWN

    asyncio.run(asyncio.wait_for(body(), 120))


def beside_a_supervisor(capsys: pytest.CaptureFixture[str], body: Callable[[Operator], Awaitable[None]]) -> None:
    """Whose server has left an address where nothing answers any more."""

    async def with_address(operator: Operator) -> None:
        with socket.socket() as taken:  # and no other process can listen there
            taken.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{taken.getsockname()[1]}"
            (operator.supervisor.directory.path / "url").write_text(address)
            await body(operator)

    beside_two_ranks(capsys, with_address)


def test_without_http_the_supervisor_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(operator: Operator) -> None:
        code, out, _ = await operator.types("scale", "1")
        assert (code, out.splitlines()[-1]) == (0, "done: 1 ranks serve")
        code, _, err = await operator.types("drain")
        assert code == 1
        assert "no server answers" in err

    beside_a_supervisor(capsys, body)


@pytest.mark.parametrize("action", ["kill", "replace"])
def test_a_name_that_is_used_again_does_nothing_twice_and_keeps_nobody_waiting(
    capsys: pytest.CaptureFixture[str], action: str
) -> None:
    async def body(operator: Operator) -> None:
        words = ("rank", action, "1", "--wait", "--operation", "x")
        assert (await operator.types(*words))[0] == 0
        assert lives(operator.supervisor) == (0, 1)
        code, out, _ = await operator.types(*words)
        assert code == 3
        assert "an operation x was carried out before" in out
        if action == "kill":
            code, out, _ = await operator.types("rank", action, "1", "--operation", "x")
            assert (code, out) == (0, "operation x was asked for before\n")
        await until(operator.supervisor, runs_with(operator.supervisor, (0, 1)))
        assert lives(operator.supervisor) == (0, 1)

    beside_a_supervisor(capsys, body)


def lives(supervisor: Supervisor) -> tuple[int, ...]:
    return record(supervisor).view.incarnations


@pytest.mark.parametrize(
    "words",
    [
        ("scale", "6", "--operation", "a b"),
        ("drain", "--operation", "."),
    ],
)
def test_what_is_no_operation_is_refused_with_a_text(
    tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--dir", str(tmp_path)]) == 1
    assert "this is no operation" in capsys.readouterr().err
