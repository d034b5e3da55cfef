"""Loads experts into the slots that the placement names, and then moves them to where repair finds them.

Weights outlive the process of their rank (:mod:`sglang_patches.rank.weights.kept_weights`). A life that takes over those of
the last one has SGLang build the model without memory, and load nothing into it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_patches import hooks, options
from sglang_patches.rank import model_facts, next_life, rank_data_plane, rank_session
from sglang_patches.rank.expert_weights import ExpertWeights, adopt, look_again, take_over
from sglang_patches.rank.rank_anchor import is_rank
from sglang_patches.rank.weights import kept_weights
from sglang_patches.rank.weights.identity import identity_of
from sglang_patches.rank.weights.kept_weights import Inheritance
from sglang_patches.rank.weights.model_tensors import WithoutMemory

logger = logging.getLogger(__name__)
_LOADER = "model_loader.loader."
_inheritance: Inheritance | None = None
_experts: ExpertWeights | None = None
"""Those that were taken over."""


def register() -> None:
    hooks.hook("layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader", _load_expert)
    hooks.hook("layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader_fused", _load_experts)
    hooks.hook("model_executor.model_runner.ModelRunner.load_model", _after_loading, "after")
    hooks.hook(_LOADER + "_initialize_model", _build)
    hooks.hook(_LOADER + "DefaultModelLoader.load_weights_and_postprocess", _fill)


def _build(original: Callable[..., Any], model_config: Any, *arguments: Any, **named: Any) -> Any:
    """Build the model, without memory if there are weights to take over."""
    global _inheritance
    _inheritance = None
    if _keeps():
        _inheritance = kept_weights.find_inheritance(identity_of(model_config), model_facts.get_facts().device)
        if _inheritance is None and next_life.is_awaited():
            raise SystemExit("a spare cannot start: its rank keeps no weights from which it could")
    if _inheritance is None:
        return original(model_config, *arguments, **named)
    with WithoutMemory():
        return _or_forget(original, model_config, *arguments, **named)


def _fill(original: Callable[..., None], model: Any, weights: Any, target_device: Any) -> None:
    """Load the weights, or take them over. SGLang then does what it does after loading with tensors without memory."""
    if _inheritance is None:
        if _keeps():
            kept_weights.make_way()
        original(model, weights, target_device)
    else:
        _or_forget(_take_over, original, model, target_device, _inheritance)


def _take_over(original: Callable[..., None], model: Any, target_device: Any, inheritance: Inheritance) -> None:
    global _experts
    original(model, iter(()), target_device)
    facts = model_facts.get_facts()
    layers = _moe_layers(model, facts.layer_ids)
    loaded = facts.moe_shape.loaded_slots
    _experts = take_over(layers, facts.first_placement, facts.device, next_life.is_awaited(), loaded)
    inheritance.give_to(model)


def _or_forget(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """If SGLang cannot do with weights that it did not load, this process ends, and the next one loads them."""
    try:
        return function(*arguments, **named)
    except Exception:
        kept_weights.forget()
        logger.warning("the weights of the last life do not fit; the next life of this rank loads its own")
        raise


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
    loaded = facts.moe_shape.loaded_slots
    weights = _experts or adopt(layers, facts.first_placement, facts.rank, facts.device, _keeps(), loaded)
    if _experts is None and weights.kept is not None:
        kept_weights.keep(model_runner.model, weights.kept, identity_of(model_runner.model_config))
    rank_session.start_session(weights, Path(model_runner.model_config.model_path))
    if next_life.is_awaited():
        session = rank_session.get_session()
        next_life.when_begun(lambda _: session.renew(look_again(weights, facts.first_placement)))
    rank_data_plane.get_plane().start(layers)


def _moe_layers(model: torch.nn.Module, layer_ids: list[int]) -> list[Any]:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    found = {module.layer_id: module for module in model.modules() if isinstance(module, FusedMoE)}
    return [found[layer_id] for layer_id in layer_ids]


def _keeps() -> bool:
    return is_rank() and options.required().keeps_weights
