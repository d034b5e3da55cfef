"""The Promela model of the view change, checked by spin: every interleaving, for safety and for liveness."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("view_change.pml")
NEEDED = ("spin", "gcc")

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in NEEDED),
    reason="spin or gcc is not installed (apt-get install spin gcc)",
)


def check(directory: Path, *, defines: tuple[str, ...] = (), liveness: bool = False) -> tuple[int, int, str]:
    """How many errors were found among how many states, and what the checker said."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=280)
        return done.stdout + done.stderr

    said = run("spin", "-a", *[f"-D{name}" for name in defines], str(MODEL))
    kind = ["-DNFAIR=4"] if liveness else ["-DSAFETY", "-DNOCLAIM"]
    said += run("gcc", "-w", "-O2", "-DVECTORSZ=2048", *kind, "-o", "pan", "pan.c")
    # -a -f: look for cycles that a fair scheduler could stay in for ever.
    said += run("./pan", "-m1000000", *(["-a", "-f", "-N", "recovers"] if liveness else []))
    errors, states = re.search(r"errors: (\d+)", said), re.search(r"(\d+) states, stored", said)
    assert errors is not None, said
    assert states is not None, said
    assert "max search depth too small" not in said, "the search was cut short"
    return int(errors[1]), int(states[1]), said


def test_one_view_per_epoch_and_no_rank_returns_from_the_dead(tmp_path: Path) -> None:
    errors, states, said = check(tmp_path)
    assert errors == 0, said
    assert states > 10_000, "the model has shrunk to nothing"


def test_when_faults_are_over_the_instance_runs_again(tmp_path: Path) -> None:
    errors, _, said = check(tmp_path, liveness=True)
    assert errors == 0, said


@pytest.mark.parametrize(
    ("mutant", "broken"), [("BROKEN_SWAP", "view_of"), ("REMOVE_UNSEEN", "lapsed")], ids=["swap", "unseen"]
)
def test_the_model_can_fail(tmp_path: Path, mutant: str, broken: str) -> None:
    errors, _, said = check(tmp_path, defines=(mutant,))
    assert errors > 0
    assert re.search(rf"assertion violated .*{broken}", said), said
