"""Experts of a checkpoint in fp8, as DeepSeek-V3 and Qwen3 publish theirs: a scale for each block of 128 x 128 weights, and
tokens that are quantised in groups of 128 when they are there. Everything else stays as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

BLOCK = 128
LARGEST = 448.0
"""The largest number of ``float8_e4m3fn``."""
_EXPERT = re.compile(r"\.experts\.\d+\.\w+_proj\.weight$")


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in fp8, and the scale of each block: weight = fp8 * scale. ValueError if it is not made of whole blocks."""
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(f"{rows} x {columns} weights cannot be cut into blocks of {BLOCK} x {BLOCK}")
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / LARGEST
    quantised = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return quantised, scales


def rewrite_checkpoint(folder: Path) -> None:
    """Quantises the experts of a checkpoint of one file, in place."""
    path = folder / "model.safetensors"
    tensors = {}
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            tensor = file.get_tensor(name)
            if _EXPERT.search(name):
                tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensor)
            else:
                tensors[name] = tensor
    as_they_were = sorted(
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2 and not _EXPERT.search(name)
    )
    save_file(tensors, path, metadata)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": as_they_were,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
