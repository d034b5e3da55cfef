"""With ``--eep-on-lost-coverage mask`` there may be experts that no slot holds. No gate picks them.

A score of minus infinity is not enough. A gate with a bias adds that to the score as it is after a sigmoid, which makes zero
of minus infinity. A gate over groups takes the best experts of the best groups, also if those have too few. So while experts
of a layer are masked, :func:`choose_unmasked` chooses. Otherwise the answer of SGLang's own gate stands, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_patches import hooks
from sglang_patches.rank import model_facts, rank_data_plane

_LAST = 1e9
"""Behind everything else: how far a masked expert is. No score and no bias is as large."""
_LATER = 1e4
"""Behind the experts of the chosen groups."""
_EPSILON = 1e-20
"""As SGLang has it: the weights that are left may all be zero."""


def register() -> None:
    hooks.hook("layers.moe.topk.select_experts", _select)


def _select(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor | None,
    topk_config: Any,
    **named: Any,
) -> Any:
    layer_ids, layer_id = model_facts.get_facts().layer_ids, named.get("layer_id")
    if router_logits is None or layer_id not in layer_ids:
        return original(hidden_states, router_logits, topk_config, **named)
    masked = rank_data_plane.get_plane().location.tables.masked[layer_ids.index(layer_id)]
    if topk_config.custom_routing_function is not None:
        return original(hidden_states, router_logits.masked_fill(masked, float("-inf")), topk_config, **named)
    chosen = original(hidden_states, router_logits, topk_config, **named)
    weights, ids = choose_unmasked(router_logits, masked, topk_config)
    # A tensor decides, not Python: the step may be captured in a graph. Rows that are only padding ask for -1, and stay so.
    ours = masked.any() & (chosen.topk_ids >= 0)
    return chosen._replace(
        topk_ids=torch.where(ours, ids.to(chosen.topk_ids.dtype), chosen.topk_ids),
        topk_weights=torch.where(ours, weights.to(chosen.topk_weights.dtype), chosen.topk_weights),
    )


def choose_unmasked(logits: torch.Tensor, masked: torch.Tensor, gate: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and numbers of the experts of each token, none of them ``masked`` if enough others are left. A masked one
    weighs nothing. ``gate`` is SGLang's ``TopKConfig``.

    As the model chooses, among those that are left. Where its best groups have too few of them, the best of other groups
    follow."""
    has_bias, has_groups = gate.correction_bias is not None, gate.use_grouped_topk
    # SGLang's gate over groups with a bias is a sigmoid, whatever its configuration says.
    function = "sigmoid" if has_bias and has_groups else gate.scoring_func
    scores = _score(logits.float().masked_fill(masked, float("-inf")), function)
    for_choice = scores + gate.correction_bias.float() if has_bias else scores
    for_choice = for_choice - _LAST * masked
    if has_groups and (gate.num_expert_group or 1) > 1:
        for_choice = for_choice - _LATER * ~_in_best_groups(for_choice, gate)
    ids = for_choice.topk(gate.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if gate.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _EPSILON)
    if gate.apply_routed_scaling_factor_on_output and gate.routed_scaling_factor is not None:
        weights = weights * gate.routed_scaling_factor
    return weights, ids


def _score(logits: torch.Tensor, function: str) -> torch.Tensor:
    match function:
        case "softmax":
            return logits.softmax(dim=-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrtsoftplus":
            return torch.nn.functional.softplus(logits).sqrt()
    raise ValueError(f"{function} is no way to score experts that eep knows: serve without --eep-on-lost-coverage mask")


def _in_best_groups(for_choice: torch.Tensor, gate: Any) -> torch.Tensor:
    """``[tokens, experts]``: whether an expert is in a group that the gate chooses. With a bias a group is as good as its two
    best experts, without one as good as its best."""
    tokens, experts = for_choice.shape
    groups = for_choice.view(tokens, gate.num_expert_group, experts // gate.num_expert_group)
    best = groups.topk(2 if gate.correction_bias is not None else 1, dim=-1).values.sum(dim=-1)
    chosen = torch.zeros_like(best, dtype=torch.bool)
    chosen.scatter_(1, best.topk(gate.topk_group, dim=-1).indices, True)
    return chosen.repeat_interleave(groups.shape[-1], dim=1)
