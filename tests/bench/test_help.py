"""Every benchmark starts: its help is shown, and what it imports only on a GPU can be imported."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(f"bench.{path.parent.name}" for path in (ROOT / "bench").glob("*/__main__.py"))


def test_benchmarks_are_found() -> None:
    assert {"bench.exchange", "bench.failover", "bench.repair"} <= set(BENCHMARKS)


@pytest.mark.parametrize(
    "module",
    [
        *BENCHMARKS,
        "bench.balance.gained",
        "bench.balance.record",
        "bench.collectives.cuda",
        "bench.context.copy_cost",
        "bench.detection.stuck",
        "bench.exchange.contest",
        "bench.soak.load",
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_help_is_shown(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: what most of them import takes seconds."""
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "usage:" in shown
    assert "default:" in shown


def test_the_gpu_side_of_the_exchange_can_be_imported() -> None:
    assert importlib.import_module("bench.exchange.cuda_report").cases
