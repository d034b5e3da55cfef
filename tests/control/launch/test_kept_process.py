"""A process beside the ranks, as its status shows it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from eep.control.launch.kept_process import KeptProcess
from tests.control.harness import PATIENCE


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_status_has_the_process_and_how_often_it_was_started(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", "import time; time.sleep(600)"]
    known: list[list[str]] = []
    kept = KeptProcess("sleeper", tmp_path, lambda: known[0] if known else None)
    try:
        assert kept.status() == {"pid": None, "starts": 0}, "there is nothing to run yet"
        known.append(asked)
        wait_for(lambda: kept.status()["pid"] is not None)
        first = kept.status()
        assert first["starts"] == 1
        assert first["pid"] is not None
        os.kill(first["pid"], signal.SIGKILL)
        wait_for(lambda: kept.status()["pid"] not in (None, first["pid"]))
        assert kept.status()["starts"] == 2
    finally:
        kept.stop()
    assert kept.status()["pid"] is None
