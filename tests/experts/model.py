"""A small model for the tests: every byte of every expert is known from its layer and number."""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from safetensors.torch import save_file

from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertLayout, ExpertMemory, TensorSpec, checksum
from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import Placement

LAYERS, EXPERTS = 3, 8


def layout(slots: int) -> ExpertLayout:
    return ExpertLayout(
        LAYERS,
        slots,
        (TensorSpec("w13_weight", (6, 50), torch.float32), TensorSpec("w2_weight", (50, 3), torch.float32)),
    )


def pieces(layer: int, expert: int) -> list[torch.Tensor]:
    rng = np.random.default_rng((layer, expert))
    return [torch.from_numpy(rng.integers(0, 256, spec.nbytes, dtype=np.uint8)) for spec in layout(1).tensors]


def checksums() -> Checksums:
    sums = Checksums.none(LAYERS, EXPERTS)
    for layer, expert in np.ndindex(LAYERS, EXPERTS):
        sums.values[layer, expert] = checksum(pieces(layer, expert))
        sums.known[layer, expert] = True
    return sums


def held(placement: Placement, rank: int) -> np.ndarray:
    size = placement.slots_per_rank
    return placement.physical_to_logical[:, rank * size : (rank + 1) * size]


def load(memory: ExpertMemory, placement: Placement, rank: int) -> None:
    experts = held(placement, rank)
    for layer, slot in np.argwhere(experts != EMPTY).tolist():
        for target, source in zip(memory.pieces(layer, slot), pieces(layer, experts[layer, slot]), strict=True):
            target.copy_(source)


def wrong_slots(memory: ExpertMemory, placement: Placement, rank: int) -> list[tuple[int, int]]:
    """The slots that do not hold, bit for bit, what the placement says."""
    experts = held(placement, rank)
    return [
        (layer, slot)
        for layer, slot in np.argwhere(experts != EMPTY).tolist()
        if not all(
            torch.equal(*pair)
            for pair in zip(memory.pieces(layer, slot), pieces(layer, experts[layer, slot]), strict=True)
        )
    ]


def save_checkpoint(directory: pathlib.Path) -> pathlib.Path:
    """The model on disk, its experts fused."""
    directory.mkdir()
    tensors = {}
    for layer in range(LAYERS):
        for index, name in enumerate(("gate_up_proj", "down_proj")):
            spec = layout(1).tensors[index]
            stack = torch.stack([pieces(layer, expert)[index] for expert in range(EXPERTS)])
            tensors[f"model.layers.{layer}.mlp.experts.{name}"] = stack.view(spec.dtype).view(EXPERTS, *spec.shape)
    save_file(tensors, directory / "model.safetensors")
    return directory
