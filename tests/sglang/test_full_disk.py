"""The real server loses a rank while its directory is full: it serves on, and the rank comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.control.harness import ROOT
from tests.control.supervisor.test_full_disk import in_own_mount

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_a_server_whose_directory_is_full_serves_on_after_a_loss(sglang: None, model: Path, tmp_path: Path) -> None:
    place, log = tmp_path / "p", tmp_path / "log"
    place.mkdir()
    if subprocess.run(in_own_mount(place, "true"), capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    program = [sys.executable, "-m", "tests.sglang.full_disk_server", str(model), str(place), str(log)]
    done = subprocess.run(
        in_own_mount(place, *program),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:] + log.read_text(errors="replace")[-4000:]
