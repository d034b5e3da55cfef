"""The server of a drill knows its processes, whatever they call themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eep.drill.sglang_server import ONE_RANK, Server

TITLED = "import setproctitle; setproctitle.setproctitle('sglang::scheduler'); print('titled', flush=True); input()"


def test_a_process_with_a_title_is_one_of_the_server(tmp_path: Path) -> None:
    """SGLang gives its processes titles, for which their environment is overwritten unless that is forbidden."""
    pytest.importorskip("setproctitle")
    server = Server(tmp_path / "no-model", ONE_RANK, tmp_path / "log")
    process = subprocess.Popen(
        [sys.executable, "-c", TITLED], env=server._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"titled\n"
        assert "scheduler" in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert server.processes() == [process.pid]
        process.communicate(b"\n")
    assert server.processes() == []
