"""What other programs took of a machine, read from a folder like /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.common.other_programs import MachineTime, others_share, read_machine

TICKS = os.sysconf("SC_CLK_TCK")


def test_what_the_machine_and_the_bench_have_worked(tmp_path: Path) -> None:
    counts = [each * TICKS for each in (10, 1, 4, 100, 50, 2, 1, 2)]
    (tmp_path / "stat").write_text(f"cpu  {' '.join(map(str, counts))} 0 0\ncpu0 1 2 3\n")
    (tmp_path / "7").mkdir()
    fields = ["0"] * 11 + [str(3 * TICKS), str(2 * TICKS)]
    (tmp_path / "7" / "stat").write_text(f"7 (a name) with a bracket) {' '.join(fields)} 0 0\n")
    found = read_machine([7, 8], tmp_path)
    assert (found.taken, found.ours) == (20.0, 5.0), (
        "idle cores, cores that wait for a disk, and a process that is gone"
    )


def test_others_took_what_the_bench_did_not() -> None:
    before, after = MachineTime(0.0, 100.0, 50.0), MachineTime(10.0, 115.0, 60.0)
    assert others_share(before, after, 2) == pytest.approx(0.25)
    assert others_share(before, MachineTime(10.0, 109.9, 60.0), 2) == 0.0, "clocks differ by a tick"


def test_this_machine_can_be_read() -> None:
    found = read_machine([os.getpid()])
    assert found.taken > found.ours > 0
