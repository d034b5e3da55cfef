"""The examples run for real and end as they should. Tests never assert on the times they show."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILL_ONE = ROOT / "examples" / "kill_one.py"


@pytest.fixture
def temporary() -> Iterator[pathlib.Path]:
    """A directory for all that the example makes. Its name is short, because Unix sockets go into it."""
    with tempfile.TemporaryDirectory(prefix="x") as name:
        yield pathlib.Path(name)


def run(*arguments: str, temporary: pathlib.Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, str(KILL_ONE), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(("ranks", "killed"), [(4, 2), (2, 0)])
def test_one_is_killed_and_replaced(ranks: int, killed: int, temporary: pathlib.Path) -> None:
    done = run("--ranks", str(ranks), "--kill-rank", str(killed), "--seconds", "0.3", "--json", temporary=temporary)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    story = json.loads(done.stdout)
    assert story["accepted_wrong"] == 0
    assert story["addresses_kept"]
    assert story["incarnations"] == {str(rank): int(rank == killed) for rank in range(ranks)}
    for rank, accepted in story["accepted"].items():
        epochs = {"3"} if int(rank) == killed else {"1", "2", "3"}
        assert set(accepted) == epochs
        assert all(steps > 0 for steps in accepted.values())
    last_act = {accepted["3"] for accepted in story["accepted"].values()}
    assert len(last_act) == 1, "all ranks take the same steps once the joiner is in"
    # Each survivor loses at most the step it was in; the join interrupts no rank.
    assert story["rejected_wrong"] <= story["rejected"] <= ranks - 1
    assert os.listdir(temporary) == []


def test_the_story_is_told_in_order(temporary: pathlib.Path) -> None:
    done = run("--seconds", "0.3", temporary=temporary)
    assert done.returncode == 0, done.stderr
    chapters = [
        "exchange tokens",
        "SIGKILL to rank 2",
        "is gone",
        "left its wait",
        "first good step of ranks 0, 1, 3",
    ]
    chapters += [
        "new process",
        "incarnation 1",
        "admit it",
        "good step of the joiner",
        "all ranks are done",
        "0 wrong",
        "never moved",
    ]
    places = [done.stdout.find(chapter) for chapter in chapters]
    assert -1 not in places
    assert places == sorted(places)
    assert "\033" not in done.stdout, "colour is for terminals"
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("arguments", [["--ranks", "1"], ["--kill-rank", "4"], ["--seconds", "0"]])
def test_nonsense_is_refused_at_once(arguments: list[str], temporary: pathlib.Path) -> None:
    done = run(*arguments, temporary=temporary)
    assert done.returncode == 2
    assert arguments[0] in done.stderr
