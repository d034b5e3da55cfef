"""What is read off a trace of a step, on traces that are made up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.serving import step_profile


def kernel(start: float, duration: float, name: str) -> dict[str, object]:
    return {"cat": "kernel", "ts": start, "dur": duration, "name": name}


DISPATCH = "void eep::(anonymous namespace)::dispatch_kernel<2, false>(eep::Home, int)"


def test_a_step_is_busy_idle_or_exchanging() -> None:
    events = [
        kernel(0, 10, "gemm<float>(int)"),
        kernel(5, 10, "other"),  # five of it beside the first
        {"cat": "cuda_runtime", "ts": 0, "dur": 1000, "name": "cudaLaunchKernel"},
        kernel(20, 30, DISPATCH),
        kernel(100, 10, "gemm<float>(int)"),
    ]
    told = step_profile.profile(events, steps=2)
    assert (told.wall, told.busy, told.exchange, told.kernels) == (55, 27.5, 15, 2)
    assert told.idle == told.wall - told.busy
    assert told.largest[:2] == (("eep::dispatch_kernel", 15), ("gemm", 10))
    assert told.often == (("gemm", 1), ("other", 0.5), ("eep::dispatch_kernel", 0.5))


def test_a_trace_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        step_profile.profile([{"ph": "M"}], steps=1)


def test_traces_are_read_packed_and_not(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [kernel(0, 1, "one")]})
    (tmp_path / "a.json").write_text(text)
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        file.write(text)
    assert step_profile.read(tmp_path / "a.json") == step_profile.read(tmp_path / "b.json.gz") == [kernel(0, 1, "one")]
