"""Qwen3-MoE: grouped-query attention with normed queries and keys, and a gate that is a softmax."""

from __future__ import annotations

from typing import Any

from eep.drill.models.family import Family
from eep.drill.models.model_sizes import Size


def _settings(size: Size) -> dict[str, Any]:
    return {
        "intermediate_size": 2 * size.hidden,
        "moe_intermediate_size": size.moe_intermediate,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "num_experts": size.experts,
        "norm_topk_prob": True,
    }


QWEN3 = Family("Qwen3MoeForCausalLM", _settings)
