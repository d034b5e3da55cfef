"""Expert weights in memory that repair can read and write.

SGLang makes one array per layer and tensor, ``[slots, ...]``. After loading, these arrays move into one region of
:class:`eep.experts.layout.ExpertMemory`, which other ranks can map. From then on their addresses never change. A life that
takes over the weights of the last one has arrays without memory until here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from eep.data_plane.memory import Memory
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertLayout, ExpertMemory, TensorSpec
from eep.experts.placement.packing import IntArray
from eep.experts.placement.slot_plan import Placement
from sglang_patches.rank.weights import kept_weights
from sglang_patches.rank.weights.kept_weights import KeptExperts
from sglang_patches.rank.weights.model_tensors import Unfit, give


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of this rank."""

    memory: ExpertMemory
    shared: Memory
    """The memory behind it. Peers may get its descriptor."""
    checksums: Checksums
    """Those of the experts that were loaded here."""
    kept: KeptExperts | None = None
    """The same memory, if it outlives this process."""
    held: IntArray | None = None
    """``[layer, slot]``: the experts that the last life has left here. None if they were loaded."""


def adopt(
    layers: list[Any], placement: Placement, rank: int, device: str, keeps: bool = False, loaded: int | None = None
) -> ExpertWeights:
    """Move the expert parameters of ``layers``, which hold what ``placement`` says of ``rank``, into one region.
    ``keeps``: the region outlives this process. ``loaded``: how many slots SGLang has made; None for all."""
    loaded = loaded or placement.slots_per_rank
    layout, device = layout_of(layers, loaded, placement.slots_per_rank), torch.device(device).type
    kept = kept_weights.take_experts(layout, device, loaded) if keeps else None
    if kept is None:
        shared = kept_weights.expert_memory_kind(layout, device, loaded).create(
            f"eep-experts-{rank}", layout.region_bytes
        )
        memory = ExpertMemory(layout, shared.bytes_at(0, layout.region_bytes))
    else:
        memory, shared = kept.memory, kept.shared
        kept.index.clear()
    for index, layer in enumerate(layers):
        for name, view in memory.tensors(index).items():
            view[:loaded].copy_(getattr(layer, name).data)
            give(layer, name, view)
    return ExpertWeights(memory, shared, Checksums.of_rank(memory, placement, rank), kept)


def take_over(
    layers: list[Any], placement: Placement, device: str, unverified: bool = False, loaded: int | None = None
) -> ExpertWeights:
    """Give the memory of the last life to the expert parameters of ``layers``, which have none. ``unverified``: a rank still
    serves from it. ``loaded``: how many slots SGLang has made; None for all."""
    slots = placement.slots_per_rank
    layout = layout_of(layers, loaded or slots, slots)
    kept = kept_weights.take_experts(layout, torch.device(device).type, loaded or slots)
    for index, layer in enumerate(layers):
        for name, view in kept.memory.tensors(index).items():
            give(layer, name, view)
    noted, experts, lasting = kept.index, placement.experts, kept.lasting_slots
    held, checksums = noted.read(experts, lasting) if unverified else noted.verify(kept.memory, experts, lasting)
    if not checksums.known.any():
        raise Unfit("none of the experts is as it was loaded")
    return ExpertWeights(kept.memory, kept.shared, checksums, kept, held)


def look_again(weights: ExpertWeights, placement: Placement) -> ExpertWeights:
    """What the slots hold by now. This process has had them mapped since the rank that is lost served from them, so they are
    what that rank had. A slot that it was writing is noted as empty."""
    assert weights.kept is not None
    held, checksums = weights.kept.index.read(placement.experts, weights.kept.lasting_slots)
    return replace(weights, held=held, checksums=checksums)


def layout_of(layers: list[Any], slots: int, most: int | None = None) -> ExpertLayout:
    """Of layers with ``slots``, as they are when there are addresses for ``most``. SystemExit if repair cannot replace single
    experts of these layers."""
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
    return ExpertLayout(len(layers), most or slots, specs)
