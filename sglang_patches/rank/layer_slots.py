"""Gives every MoE layer its slots: one for each expert, and the redundant ones.

Most models of SGLang add the redundant ones themselves. GLM-4.5 does not, and would have too few slots for its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_patches import hooks, options


def register() -> None:
    hooks.hook("layers.moe.fused_moe_triton.layer.FusedMoE.__init__", _build)


def _build(original: Callable[..., None], layer: Any, *arguments: Any, **named: Any) -> None:
    asked = options.required()
    if arguments:
        arguments = (count_slots(arguments[0], asked.experts, asked.redundant_experts), *arguments[1:])
    else:
        named["num_experts"] = count_slots(named["num_experts"], asked.experts, asked.redundant_experts)
    original(layer, *arguments, **named)


def count_slots(given: int, experts: int | None, redundant: int) -> int:
    """How many slots a layer has over all ranks, if its model asks for ``given`` of them. SystemExit if that is neither the
    number of its experts nor that with the redundant ones. ``experts`` is None if it is not known."""
    if experts is None or given == experts + redundant:
        return given
    if given == experts:
        return experts + redundant
    raise SystemExit(
        f"--ep-backend eep: an MoE layer of this model has {given} experts, and its configuration says {experts}: eep cannot "
        "place what it does not know; serve this model without --ep-backend eep"
    )
