"""A checkpoint of many gigabytes, made in little time and memory: one random layer, written as often as it takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from eep.drill.models.checkpoint import write_model
from eep.drill.models.model_sizes import Size

LAYERS = {
    # 50 MB
    "cpu": Size(64, 8, 1, 512, 256, 8, 4, 64, spread=0.1),
    # 1.2 GB
    "cuda": Size(128, 8, 1, 2048, 768, 16, 4, 128, spread=0.07),
}
"""What one layer is like, by device."""
_FIRST = "model.layers.0."


def make_deep_model(folder: Path, size: Size, gigabytes: float) -> Path:
    """Writes layers of ``size`` until their weights have so many gigabytes, which are 10**9 bytes."""
    write_model(folder, size)
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    layer = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_FIRST)}
    layers = max(1, math.ceil(gigabytes * 1e9 / sum(each.nbytes for each in layer.values())))
    file.unlink()
    save_file(tensors, folder / "rest.safetensors")
    index = dict.fromkeys(tensors, "rest.safetensors")
    for number in range(layers):
        renamed = {f"model.layers.{number}.{name.removeprefix(_FIRST)}": each for name, each in layer.items()}
        save_file(renamed, folder / f"layer-{number}.safetensors")
        index.update(dict.fromkeys(renamed, f"layer-{number}.safetensors"))
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    told = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told, indent=1) + "\n")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
