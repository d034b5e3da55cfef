"""What a server needs of its machine: too little of it is refused, with a sentence that says what to enlarge."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_patches.server import machine_limits

REQUIRE = "from sglang_patches.server.machine_limits import *; require_limits({ranks})"
SAY = "; import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"


def run_with(soft: int, hard: int, ranks: int) -> subprocess.CompletedProcess[str]:
    """A process that has these limits of descriptors, and needs those of a server; it prints its soft limit."""
    return subprocess.run(
        [sys.executable, "-c", REQUIRE.format(ranks=ranks) + SAY],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one() -> None:
    done = run_with(64, 1000, ranks=4)
    assert (done.returncode, done.stdout.strip()) == (0, "1000"), done.stderr


def test_256_descriptors_are_enough_for_four_ranks() -> None:
    assert run_with(256, 256, ranks=4).returncode == 0


def test_too_few_descriptors_are_refused() -> None:
    done = run_with(64, 100, ranks=4)
    assert done.returncode != 0
    assert "may have 100; raise the limit" in done.stderr


def test_more_ranks_need_more_descriptors() -> None:
    assert run_with(256, 256, ranks=64).returncode != 0


@pytest.mark.parametrize("limits", [(256, resource.RLIM_INFINITY), (1 << 20, 1 << 30)])
def test_a_limit_that_is_no_limit_is_plenty(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: given.append(wanted))
    assert machine_limits.raise_descriptors() == 65535
    assert given == ([(65535, limits[1])] if limits[0] < 65535 else [])


@pytest.mark.parametrize(("room", "is_refused"), [(64 << 10, True), (4 << 20, False), (64 << 20, False)])
def test_too_little_shared_memory_is_refused(room: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=room // 4096, f_frsize=4096))
    if not is_refused:
        machine_limits.require_limits(4)
        return
    with pytest.raises(SystemExit, match=r"/dev/shm has 64 KiB left.*--shm-size"):
        machine_limits.require_limits(4)


def test_where_there_is_no_shared_memory_to_look_at_none_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_missing(path: str) -> os.statvfs_result:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", is_missing)
    machine_limits.require_limits(4)
