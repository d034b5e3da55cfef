"""The server of a drill knows its processes, whatever they call themselves, and its files in shared memory."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.drill.sglang_server import FOUR_RANKS, ONE_RANK, Server

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


@pytest.mark.parametrize(
    ("arguments", "groups"), [(ONE_RANK, 1), (FOUR_RANKS, 4), ((*FOUR_RANKS, "--eep-max-ranks", "6"), 6)]
)
def test_each_rank_that_there_may_be_has_a_group_of_cores(
    tmp_path: Path, arguments: tuple[str, ...], groups: int
) -> None:
    """SGLang 0.5.17 ends at its start if there are more."""
    server = Server(tmp_path / "no-model", arguments, tmp_path / "log")
    assert len(server._environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == groups


MAPS = "import mmap, os, sys; kept = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 4096); print('mapped', flush=True); input()"


@pytest.fixture
def shared_files() -> Iterator[tuple[Path, Path]]:
    """Two files in shared memory, with names as SGLang gives them."""
    paths = [Path(f"/dev/shm/sglang_loads_{secrets.token_hex(6)}_test.shm") for _ in range(2)]
    yield paths[0], paths[1]
    for path in paths:
        path.unlink(missing_ok=True)


def test_a_file_in_shared_memory_is_left_over_only_if_it_was_the_servers_own(
    tmp_path: Path, shared_files: tuple[Path, Path]
) -> None:
    server = Server(tmp_path / "no-model", ONE_RANK, tmp_path / "log")
    own, foreign = shared_files
    for path in shared_files:
        path.write_bytes(bytes(4096))
    process = subprocess.Popen(
        [sys.executable, "-c", MAPS, str(own)], env=server._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        assert server.leftovers(within=0) == [f"process {process.pid}", str(own)]
        process.communicate(b"\n")
    assert server.leftovers(within=0) == [str(own)]
    own.unlink()
    assert foreign.exists()
    assert server.leftovers(within=0) == []


def test_a_server_that_is_killed_with_its_keeper_leaves_no_file(
    tmp_path: Path, shared_files: tuple[Path, Path]
) -> None:
    server = Server(tmp_path / "no-model", ONE_RANK, tmp_path / "log")
    own, foreign = shared_files
    for path in shared_files:
        path.write_bytes(bytes(4096))
    server._command = [sys.executable, "-c", MAPS.replace("input()", "import time; time.sleep(600)"), str(own)]
    server.launch()
    while b"mapped" not in (tmp_path / "log").read_bytes():
        time.sleep(0.05)
    server.kill()
    assert not own.exists()
    assert foreign.exists()
    assert server.leftovers(within=0) == []


LAUNCHES = """
import sys, time
from pathlib import Path
from eep.drill.sglang_server import Server
server = Server(Path(), (), Path(sys.argv[1]))
server._command = [sys.executable, "-c", "import time; time.sleep(600)"]
server.launch()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_drill_that_launched_it(tmp_path: Path, number: signal.Signals) -> None:
    drill = subprocess.Popen([sys.executable, "-c", LAUNCHES, str(tmp_path / "log")], stdout=subprocess.PIPE)
    with drill:
        assert drill.stdout is not None
        pid = int(drill.stdout.readline())
        with open(os.pidfd_open(pid)) as server:
            drill.send_signal(number)
            assert select.select([server], [], [], 30)[0], "the server outlived the drill"
