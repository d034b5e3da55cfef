"""Expert weights in memory that repair can read and write.

SGLang makes one array per layer and tensor, ``[slots, ...]``. After loading, these arrays move into one region of
:class:`eep.experts.layout.ExpertMemory`, which other ranks can map. From then on their addresses never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eep.data_plane.memory import Memory, memory_of
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertLayout, ExpertMemory, TensorSpec
from eep.experts.placement.slot_plan import Placement


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of this rank."""

    memory: ExpertMemory
    shared: Memory
    """The memory behind it. Peers may get its descriptor."""
    checksums: Checksums
    """Those of the experts that were loaded here."""


def adopt(layers: list[Any], placement: Placement, rank: int, device: str) -> ExpertWeights:
    """Move the expert parameters of ``layers``, which hold what ``placement`` says of ``rank``, into one region."""
    slots = placement.slots_per_rank
    names = [name for name, each in layers[0].named_parameters(recurse=False) if each.dim() and each.shape[0] == slots]
    for name, _ in layers[0].named_parameters(recurse=False):
        if name not in names and name.endswith("input_scale"):
            raise SystemExit(
                f"--ep-backend eep: {name} is one for all experts that a rank has loaded, and would be wrong for those that "
                "repair brings in; use a checkpoint with dynamic scales of activations"
            )
    for name in names:
        if not getattr(layers[0], name).is_contiguous():
            raise SystemExit(
                f"--ep-backend eep: SGLang reordered {name} when it loaded it, so repair cannot replace a single expert; "
                "choose other kernels with --moe-runner-backend"
            )
    specs = tuple(
        TensorSpec(name, tuple(getattr(layers[0], name).shape[1:]), getattr(layers[0], name).dtype) for name in names
    )
    layout = ExpertLayout(len(layers), slots, specs)
    shared = memory_of(torch.device(device).type).create(f"eep-experts-{rank}", layout.region_bytes)
    memory = ExpertMemory(layout, shared.bytes_at(0, layout.region_bytes))
    for index, layer in enumerate(layers):
        for name, view in memory.tensors(index).items():
            parameter = getattr(layer, name)
            view.copy_(parameter.data)
            parameter.data = view
    return ExpertWeights(memory, shared, Checksums.of_rank(memory, placement, rank))
