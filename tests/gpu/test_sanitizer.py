"""The kernels under compute-sanitizer. One rank: under the tool, kernels of several do not run at the same time."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_finding(tool: str) -> None:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_MPS")}
    done = subprocess.run(
        [
            "compute-sanitizer",
            "--tool",
            tool,
            "--kernel-name",
            "kns=eep",
            # A driver that refuses fabric handles is asked all the same, and that is no finding.
            "--report-api-errors",
            "no",
            "--error-exitcode",
            "9",
            sys.executable,
            "-m",
            "tests.gpu.lone_rank",
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "all well" in done.stderr
