"""The model whose gates are uneven, and what the benchmark makes of its figures."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from bench.balance.gained import page
from bench.balance.skewed_model import SIZE, make_skewed_model

HEAD = {
    "command": "python -m bench.balance.gained",
    "commit": "abc",
    "date": "2026-01-01",
    "machine": {"cpu": "a cpu", "cores": 2, "python": "3", "torch": "2"},
    "setting": {"favour": 3.0, "clients": 8, "sglang": "0.5"},
}


def test_the_first_half_of_the_experts_is_favoured_in_every_layer(tmp_path: Path) -> None:
    tensors = load_file(make_skewed_model(tmp_path / "model", 3.0) / "model.safetensors")
    gates = [each.float() for name, each in tensors.items() if name.endswith("mlp.gate.weight")]
    assert len(gates) == SIZE.layers
    half = SIZE.experts // 2
    for gate in gates:
        assert 2.5 < gate[:half].std() / gate[half:].std() < 3.5


def test_the_page_says_what_is_gained() -> None:
    told = [
        {"kind": "stay", "doses": 0, "balancedness": None, "tokens_per_second": 100.0},
        {"kind": "move", "doses": 2, "balancedness": 0.98, "tokens_per_second": 150.0},
        {"kind": "move", "doses": 3, "balancedness": 0.97, "tokens_per_second": 130.0},
    ]
    text = page(HEAD, told)
    assert "| experts move | 150 | 2 | 0.98 |" in text
    assert "does 1.40 times as much" in text
