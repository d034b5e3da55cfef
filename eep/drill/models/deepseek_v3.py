"""DeepSeek-V3, R1 and Kimi-K2: latent attention (MLA), a gate over groups of experts with a bias that corrects its scores,
a shared expert, and a first layer without experts."""

from __future__ import annotations

from typing import Any

from eep.drill.models.family import Family, fill_biases
from eep.drill.models.model_sizes import Size

GROUPS = 4
_LATENT = 512
"""The real size of a latent, for which kernels on a GPU are made."""


def _settings(size: Size) -> dict[str, Any]:
    return {
        "intermediate_size": 2 * size.hidden,
        "moe_intermediate_size": size.moe_intermediate,
        "num_key_value_heads": size.heads,
        "q_lora_rank": 3 * size.hidden // 4,
        # Of another size than a key: one that is taken for the other does not fit.
        "kv_lora_rank": _LATENT if size.head_dim >= 128 else 2 * size.head_dim,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": size.head_dim // 2,
        "v_head_dim": size.head_dim,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "n_group": GROUPS,
        "topk_group": GROUPS // 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
        },
    }


DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", _settings, fill_biases)
