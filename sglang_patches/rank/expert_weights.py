"""Expert weights: loaded into the slots that the placement names, and kept in memory that repair can read and write.

SGLang makes one array per layer and tensor, ``[slots, ...]``. After loading, these arrays are moved into one region of
:class:`eep.experts.layout.ExpertMemory`, which other ranks can map; from then on their addresses never change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eep.data_plane.memory import Memory, memory_of
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertLayout, ExpertMemory, TensorSpec
from sglang_patches import hooks
from sglang_patches.rank import instance


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of this rank."""

    memory: ExpertMemory
    shared: Memory
    """The memory behind it, whose descriptor may be given to other ranks."""
    checksums: Checksums
    """Of the experts that were loaded here."""


_loaded: ExpertWeights | None = None


def loaded() -> ExpertWeights:
    """The experts of this rank, once the model is loaded."""
    if _loaded is None:
        raise RuntimeError("expert weights are not there before the model is loaded")
    return _loaded


def register() -> None:
    hooks.hook("layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader", _load_expert)
    hooks.hook("model_executor.model_runner.ModelRunner.load_model", _after_loading, "after")


def _load_expert(
    original: Callable[..., None],
    layer: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int | None,
) -> None:
    """Load an expert of the checkpoint into every slot of this rank that is to hold it."""
    if expert_id is None:
        raise SystemExit("--ep-backend eep: checkpoints with all experts in one tensor cannot be loaded yet")
    here = instance.current()
    held = here.location.held_by(here.rank, here.layer_ids.index(layer.layer_id))
    for slot, expert in enumerate(held):
        if expert == expert_id:
            layer._weight_loader_impl(
                param=param, loaded_weight=loaded_weight, weight_name=weight_name, shard_id=shard_id, expert_id=slot
            )


def _after_loading(_: None, model_runner: Any) -> None:
    global _loaded
    here = instance.current()
    layers = _moe_layers(model_runner.model, here.layer_ids)
    _loaded = adopt(layers, here)
    here.start(layers, _loaded, Path(model_runner.model_config.model_path))


def adopt(layers: list[Any], here: instance.Instance) -> ExpertWeights:
    """Move the expert parameters of ``layers`` into one region."""
    slots = here.first_placement.slots_per_rank
    names = [name for name, each in layers[0].named_parameters(recurse=False) if each.dim() and each.shape[0] == slots]
    for name, _ in layers[0].named_parameters(recurse=False):
        if name not in names and name.endswith("input_scale"):
            raise SystemExit(
                f"--ep-backend eep: {name} is one for all experts that a rank has loaded, and would be wrong for those that "
                "it gets later; use a checkpoint whose activations are scaled while it runs"
            )
    for name in names:
        if not getattr(layers[0], name).is_contiguous():
            raise SystemExit(
                f"--ep-backend eep: {name} was put into an order of its own when it was loaded, in which a single expert "
                "cannot be replaced; choose other kernels with --moe-runner-backend"
            )
    specs = tuple(
        TensorSpec(name, tuple(getattr(layers[0], name).shape[1:]), getattr(layers[0], name).dtype) for name in names
    )
    layout = ExpertLayout(len(layers), slots, specs)
    shared = memory_of(torch.device(here.device).type).create(f"eep-experts-{here.rank}", layout.region_bytes)
    memory = ExpertMemory(layout, shared.bytes_at(0, layout.region_bytes))
    for index, layer in enumerate(layers):
        for name, view in memory.tensors(index).items():
            parameter = getattr(layer, name)
            view.copy_(parameter.data)
            parameter.data = view
    return ExpertWeights(memory, shared, Checksums.of_rank(memory, here.first_placement, here.rank))


def _moe_layers(model: torch.nn.Module, layer_ids: list[int]) -> list[Any]:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    found = {module.layer_id: module for module in model.modules() if isinstance(module, FusedMoE)}
    return [found[layer_id] for layer_id in layer_ids]
