"""Loads experts into the slots that the placement names, and then moves them to where repair finds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_patches import hooks
from sglang_patches.rank import model_facts, rank_data_plane, rank_session
from sglang_patches.rank.expert_weights import adopt


def register() -> None:
    hooks.hook("layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader", _load_expert)
    hooks.hook("layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader_fused", _load_experts)
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
    """Load an expert of the checkpoint into every slot of this rank that starts with it."""
    if expert_id is None:
        raise SystemExit(
            "--ep-backend eep: this checkpoint has the quantised experts of a layer in one tensor (MXFP4), of which SGLang "
            "gives a rank only a part; use a checkpoint in bfloat16, or one with one tensor per expert"
        )
    for slot, expert in enumerate(model_facts.get_facts().experts_to_load(layer.layer_id)):
        if expert == expert_id:
            layer._weight_loader_impl(
                param=param, loaded_weight=loaded_weight, weight_name=weight_name, shard_id=shard_id, expert_id=slot
            )


def _load_experts(
    original: Callable[..., None],
    layer: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    *arguments: Any,
    **named: Any,
) -> None:
    """Load from a tensor with all experts of a layer those that the slots of this rank start with."""
    held = model_facts.get_facts().experts_to_load(layer.layer_id)
    # A slot that starts empty is never asked for, whatever is in it.
    original(layer, param, loaded_weight[[max(expert, 0) for expert in held]], *arguments, **named)


def _after_loading(_: None, model_runner: Any) -> None:
    facts = model_facts.get_facts()
    layers = _moe_layers(model_runner.model, facts.layer_ids)
    weights = adopt(layers, facts.first_placement, facts.rank, facts.device)
    rank_session.start_session(weights, Path(model_runner.model_config.model_path))
    rank_data_plane.get_plane().start(layers)


def _moe_layers(model: torch.nn.Module, layer_ids: list[int]) -> list[Any]:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    found = {module.layer_id: module for module in model.modules() if isinstance(module, FusedMoE)}
    return [found[layer_id] for layer_id in layer_ids]
