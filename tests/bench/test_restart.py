"""The model of many layers that servers are restarted with, and what the benchmark makes of its figures."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from bench.restart.__main__ import CASES, page
from bench.restart.deep_model import make_deep_model
from eep.drill.models.model_sizes import Size

ONE_LAYER = Size(4, 2, 1, 64, 32, 2, 1, 32, spread=0.1)
HEAD = {
    "command": "python -m bench.restart",
    "commit": "abc",
    "date": "2026-01-01",
    "machine": {"cpu": "a cpu", "cores": 2, "python": "3", "torch": "2"},
    "setting": {"device": "cpu", "model_gigabytes": 0.3, "held_gigabytes": 0.4, "sglang": "0.5"},
}


def test_a_deep_model_has_as_many_bytes_as_were_asked_for_and_loads(tmp_path: Path) -> None:
    folder = make_deep_model(tmp_path / "model", ONE_LAYER, 0.0005)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes = [path.stat().st_size for path in folder.glob("layer-*.safetensors")]
    assert len(sizes) == layers > 1
    assert 0.0005e9 <= sum(sizes) < 0.0005e9 + 2 * sizes[0]
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - it is no mapping

    import transformers

    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert len(model.model.layers) == layers
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def test_the_page_has_a_row_for_each_way_to_start() -> None:
    starts = [{"case": case, "seconds": seconds} for case in CASES for seconds in (9.0, 7.0, 8.0)]
    text = page(HEAD, {"starts": starts})
    assert text.count("| 3 | 8.0 | 7.0 | 9.0 |") == len(CASES)
