"""What a server is started with on each device, and the MPS daemon that ranks on one GPU share: a stand-in for it here."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from eep.drill import mps
from eep.drill.devices import CPU, CUDA, DEVICES
from eep.drill.sglang_server import FOUR_RANKS, Server

STAND_IN = """#!/bin/sh
# Notes how it is called. With -d it leaves a daemon behind, as the real one does; "quit" ends that.
echo "$@" >> {calls}
pid=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then
  {when_started}
  sleep 3600 & echo $! > $pid
  echo $! >> {daemons}
else
  read order; echo "$order" >> {calls}
  {when_told}
fi
"""


class MpsProgram:
    """A program of that name, first in the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(self, when_started: str = "true", when_told: str = "kill $(cat $pid)") -> None:
        path = self._folder / mps.PROGRAM
        path.write_text(
            STAND_IN.format(
                calls=self._folder / "calls",
                daemons=self._folder / "daemons",
                when_started=when_started,
                when_told=when_told,
            )
        )
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return (self._folder / "calls").read_text().splitlines()

    @property
    def daemon(self) -> int:
        return int((self._folder / "daemons").read_text())


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MpsProgram:
    return MpsProgram(tmp_path, monkeypatch)


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"process {pid} is still there")


def test_the_daemon_has_its_own_directories_and_ends_with_them(program: MpsProgram) -> None:
    program.write()
    with mps.daemon() as variables:
        assert set(variables) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        assert all(Path(path).stat().st_mode & 0o777 == 0o700 for path in variables.values())
        assert program.calls == ["-d"]
        os.kill(program.daemon, 0)
    assert program.calls[1:] == ["", "quit -t 10"]
    wait_until_gone(program.daemon)
    assert not any(Path(path).exists() for path in variables.values())


def test_it_ends_when_what_it_was_for_fails(program: MpsProgram) -> None:
    program.write()
    with pytest.raises(KeyError), mps.daemon():
        raise KeyError
    wait_until_gone(program.daemon)


def test_a_daemon_that_does_not_do_as_told_is_killed(program: MpsProgram) -> None:
    program.write(when_told="exit 1")
    with mps.daemon():
        pass
    wait_until_gone(program.daemon)


def test_one_that_cannot_be_started_says_why(
    program: MpsProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.write(when_started='echo "no such device" >&2; exit 3')
    with pytest.raises(RuntimeError, match="no such device"), mps.daemon():
        pass
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(RuntimeError, match="NVIDIA driver"), mps.daemon():
        pass


def test_a_device_that_is_not_shared_needs_no_daemon(program: MpsProgram) -> None:
    program.write()
    with CPU.prepared() as variables:
        assert variables == {}
    with CUDA.prepared() as variables:
        assert mps.PIPES in variables
    assert program.calls.count("-d") == 1


@pytest.mark.parametrize("name", DEVICES)
def test_a_server_is_started_with_what_its_device_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def note(command: list[str], env: dict[str, str], **_: object) -> None:
        started.append((command, env))
        raise OSError("noted")

    monkeypatch.setattr(subprocess, "Popen", note)
    server = Server(tmp_path, FOUR_RANKS, tmp_path / "log", {"MORE": "1"}, device=DEVICES[name])
    with pytest.raises(OSError, match="noted"):
        server.__enter__()
    ((command, environment),) = started
    assert command[command.index("--device") + 1] == name
    assert command[-len(FOUR_RANKS) :] == list(FOUR_RANKS)
    assert environment["MORE"] == "1"
    assert DEVICES[name].environment.items() <= environment.items()
    assert ("EEP_CPU_GAPS" in environment) == (name == "cpu")


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_with_a_prefix_cache_differs_in_nothing_else(name: str) -> None:
    flags = DEVICES[name].flags
    assert "--disable-radix-cache" in flags
    assert DEVICES[name].caching().flags == tuple(flag for flag in flags if flag != "--disable-radix-cache")
