"""Runs the whole matrix of fault points and random membership schedules, again and again, until its seconds are over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.membership.sim import soak as schedules

SCHEDULES_SECONDS = 600.0
MATRIX = ("tests/recovery/test_session.py", "tests/sglang/plain/test_failpoints.py")


def main(seconds: float) -> int:
    ends, failed = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        failed += _run_matrix(ends - time.monotonic())
        failed += schedules.main(max(0.0, min(SCHEDULES_SECONDS, ends - time.monotonic())))
    return 1 if failed else 0


def _run_matrix(seconds: float) -> int:
    """1 if a case failed, else 0. Cases that the time was too short for do not count."""
    command = [sys.executable, "-m", "pytest", "-v", *MATRIX]
    process = subprocess.Popen(command, env={**os.environ, "EEP_ALL_FAILPOINTS": "1"})
    try:
        return int(process.wait(None if seconds == float("inf") else seconds) != 0)
    except subprocess.TimeoutExpired:
        print("the time is over before the matrix was: its last cases did not run", flush=True)
        process.send_signal(signal.SIGINT)  # so that it stops the servers that it has started
        process.wait()
        return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else float("inf")))
