"""Experts that are stored with a row for each input are given with a row for each output."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from eep.experts.checkpoint.conversion import open_checkpoint
from eep.experts.layout import ExpertMemory
from eep.experts.repair.reader import Want

EXPERTS, HIDDEN = 3, 4


def test_square_matrices_are_transposed_too(tmp_path: Path) -> None:
    """Their shape does not tell."""
    stored = {
        f"model.layers.0.mlp.experts.{name}": torch.randn((EXPERTS, *shape))
        for name, shape in (
            ("gate_up_proj", (HIDDEN, HIDDEN)),
            ("gate_up_proj_bias", (HIDDEN,)),
            ("down_proj", (2, HIDDEN)),
            ("down_proj_bias", (HIDDEN,)),
        )
    }
    save_file(stored, tmp_path / "model.safetensors")
    served = open_checkpoint(tmp_path, dtypes=(torch.float32,) * 4)
    memory = ExpertMemory(served.layout, torch.zeros(served.layout.region_bytes, dtype=torch.uint8))
    served.reader.read([Want(0, 2, 0, memory.pieces(0, 0))])
    found = {name: tensor[0] for name, tensor in memory.tensors(0).items()}
    for ours, theirs in (("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj")):
        assert torch.equal(found[ours], stored[f"model.layers.0.mlp.experts.{theirs}"][2].t())
        assert torch.equal(found[f"{ours}_bias"], stored[f"model.layers.0.mlp.experts.{theirs}_bias"][2])
