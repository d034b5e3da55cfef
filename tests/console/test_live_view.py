"""``eep status --watch`` on a terminal: it goes on over a server that does not answer, and recovers."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eep import cli
from eep.console import server_choice
from eep.console.live_view import with_absence
from eep.console.server_choice import ServerChoice
from tests.console.server_stand_in import Routes, serving
from tests.console.test_status_table import STATUS
from tests.ports import free_ports

_WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = sys.modules['rich.live'] = None; from eep.cli import main; sys.exit(main())"
)
_WITH_RICH = "import sys; from eep.cli import main; sys.exit(main())"


class Terminal:
    """A command of ``eep`` on a terminal of its own."""

    def __init__(self, program: str, *words: str) -> None:
        self._screen, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "60"},
        )
        os.close(other)

    def read_until(self, text: str) -> str:
        """All that was shown from now on, until ``text`` was."""
        shown = ""
        while text not in shown:
            try:
                shown += os.read(self._screen, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended before it showed {text!r}: {shown}") from None
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture(params=[_WITH_RICH, _WITHOUT_RICH], ids=["rich", "plain"])
def program(request: pytest.FixtureRequest) -> str:
    if request.param == _WITH_RICH:
        pytest.importorskip("rich")
    return str(request.param)


@pytest.mark.usefixtures("url")
def test_a_view_says_since_when_there_is_no_answer_and_recovers(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)  # which is this test's own while none listens there
    with serving(port) as server:
        terminal = Terminal(program, "status", "--watch", "0.2", "--url", f"http://127.0.0.1:{port}")
        try:
            terminal.read_until("1 of 3 ranks in")
            server.shutdown()
            server.server_close()
            shown = terminal.read_until("no answer since ")
            assert "1 of 3 ranks in" in shown + terminal.read_until("no server answers at"), "what was known last stays"
            monkeypatch.setattr(Routes, "status", {**STATUS, "epoch": 77})
            with serving(port):
                terminal.read_until("epoch 77")
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.process.wait(60) == cli.INTERRUPTED
        finally:
            terminal.close()


def test_the_server_that_is_watched_stays_the_one_when_another_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, asked = tmp_path / "first", tmp_path / "second", list[Path]()
    first.mkdir(0o700)
    second.mkdir(0o700)
    found = [[first], [first, second], [second]]

    def status_of(choice: ServerChoice) -> dict[str, Any]:
        assert choice.directory is not None
        asked.append(choice.directory)
        return STATUS

    def watched(look: Callable[[], str], every: float, absence: object) -> None:
        look()
        found.pop(0)
        look()
        found.pop(0)
        first.rmdir()
        look()

    monkeypatch.delenv("EEP_CONTROL_DIR", raising=False)
    monkeypatch.setattr(server_choice, "find_servers", lambda: found[0])
    monkeypatch.setattr(ServerChoice, "status", status_of)
    monkeypatch.setattr("eep.console.server_commands.watch", watched)
    assert cli.main(["status", "--watch"]) == 0
    assert asked[:3] == [first, first, second]


def test_a_server_that_never_answered_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--watch", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers" in capsys.readouterr().err


def test_what_was_known_last_stays_with_the_time_of_the_answer() -> None:
    shown = with_absence("RUN   epoch 3", 0.0, "no server answers")
    assert shown.splitlines()[0] == "RUN   epoch 3"
    assert shown.splitlines()[-1].endswith(":00:00: no server answers")


def test_programs_get_an_object_for_each_look(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def watched(look: object, every: float, absence: object) -> None:
        assert every == 0.2, "it does not look more often than that"
        assert callable(look)
        assert callable(absence)
        shown.extend((look(), absence(look(), 5.0, "gone")))

    monkeypatch.setattr("eep.console.server_commands.watch", watched)
    cli.main(["status", "--json", "--watch", "0.01", "--url", url])
    assert json.loads(shown[0])["phase"] == "RUN"
    assert json.loads(shown[1]) == {"no_answer_since": 5.0, "why": "gone"}
