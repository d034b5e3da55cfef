"""``eep anchor``: a process that holds memory while servers come and go."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.anchor.anchor import Anchor, list_held
from eep.data_plane.memory.shm import SharedMemory

SIZE = 3 << 20
LIFE = """
import os, signal, sys
from pathlib import Path
from eep.anchor.anchor import Anchor
from eep.data_plane.memory.shm import SharedMemory
memory, life = Anchor(Path(sys.argv[1]), 2, int(sys.argv[2])).attach("experts", 3 << 20, SharedMemory)
memory.bytes_at(0, memory.size)[:4] += 1
print(life, int(memory.bytes_at(0, memory.size)[3]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "eep.cli", "anchor", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=False)


def live(directory: Path, number: int) -> str:
    done = subprocess.run([sys.executable, "-c", LIFE, str(directory), str(number)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.strip()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "a"
    with subprocess.Popen(command("serve", "--dir", directory), stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert "anchor in" in daemon.stdout.readline()
        yield directory
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(10) == 0
    assert not list(directory.glob("*.sock"))


def test_it_holds_what_killed_processes_have_left_until_it_is_told_to_let_go(served: Path) -> None:
    assert live(served, 0) == "None 1"
    assert live(served, 5) == "0 2"
    assert json.loads(run("status", "--dir", served, "--json").stdout) == [
        {"rank": 2, "name": "experts", "incarnation": 5, "size": SIZE}
    ]
    assert "3.0 MiB" in run("status", "--dir", served).stdout
    assert run("release", "--dir", served).stdout == "let go of 1 pieces, 3.0 MiB\n"
    assert list_held(served) == []
    assert live(served, 6) == "None 1"


def test_a_second_one_is_refused_and_the_first_holds_on(served: Path) -> None:
    anchor = Anchor(served, 1, 0)
    anchor.attach("experts", SIZE, SharedMemory)
    second = run("serve", "--dir", served)
    assert second.returncode == 1
    assert "another 'eep anchor serve' holds memory" in second.stderr
    assert [each.rank for each in list_held(served)] == [1]
    anchor.close()


def test_where_none_serves_an_error_says_so(tmp_path: Path) -> None:
    for action in ("status", "release"):
        done = run(action, "--dir", tmp_path)
        assert done.returncode == 1
        assert "no process holds memory" in done.stderr


def test_a_directory_of_all_users_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o755)
    done = run("serve", "--dir", place)
    assert done.returncode == 1
    assert "no other user can enter" in done.stderr
