"""GLM-4.5: grouped-query attention with biases, of which half of each head is rotated; a gate with a bias that corrects its
scores, a shared expert, and a first layer without experts."""

from __future__ import annotations

from typing import Any

from eep.drill.models.family import Family, fill_biases
from eep.drill.models.model_sizes import Size


def _settings(size: Size) -> dict[str, Any]:
    return {
        "intermediate_size": 2 * size.hidden,
        "moe_intermediate_size": size.moe_intermediate,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    }


GLM4_MOE = Family("Glm4MoeForCausalLM", _settings, fill_biases)
