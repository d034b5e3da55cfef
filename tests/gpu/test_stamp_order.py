"""Rows that are loaded before a stamp are never newer than it, though no fence lies between; see stamp_order.cu."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc to build the program with")
    built = tmp_path_factory.mktemp("stamp") / "stamp_order"
    sources = ["-I", str(ROOT / "eep_cuda/include"), "-I", str(ROOT / "eep_cuda/src")]
    command = ["nvcc", "-std=c++20", "-O3", "-arch=sm_90", *sources, str(Path(__file__).with_name("stamp_order.cu"))]
    subprocess.run([*command, "-o", str(built)], check=True, timeout=120)
    return built


@pytest.mark.parametrize("vectors", [1 << 18, 1 << 20, 1 << 22], ids=["4 MiB", "16 MiB", "64 MiB"])
def test_a_stamp_behind_rows_is_never_older_than_they_are(program: Path, vectors: int) -> None:
    done = subprocess.run([str(program), str(vectors), "5000"], capture_output=True, text=True, check=True, timeout=120)
    behind, before = ([int(count) for count in line.split()] for line in done.stdout.splitlines())
    reads, mixed, newer = behind
    assert newer == 0, f"{newer} of {reads} reads found a row that was newer than the stamp"
    assert mixed > 100, f"only {mixed} of {reads} reads met the writer: this shows nothing"
    assert before[2] > 0, "with the stamp loaded first none is newer either: this would not have seen a wrong order"
