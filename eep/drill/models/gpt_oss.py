"""gpt-oss: attention with sinks, over a window in every second layer; experts with biases, all of a layer in one tensor."""

from __future__ import annotations

from typing import Any

from eep.drill.models.family import Family, fill_biases
from eep.drill.models.model_sizes import Size

WINDOW = 16
"""Tokens; short, so that the prompts of drills are longer."""
_NARROWER = 0.5
"""By this queries and keys are, for no norm bounds their product: else attention would make much of the last bits."""
_USUAL_SCORE = 2.5
"""The standard deviation of that product, with the spread of every size: a sink must be as large to be felt."""


def _settings(size: Size) -> dict[str, Any]:
    return {
        "intermediate_size": size.moe_intermediate,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "num_local_experts": size.experts,
        "sliding_window": WINDOW,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"truncate": False, "original_max_position_embeddings": 4096},
        },
    }


def _fill(model: Any) -> None:
    fill_biases(model)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(_USUAL_SCORE, _USUAL_SCORE / 2)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data.mul_(_NARROWER)


GPT_OSS = Family("GptOssForCausalLM", _settings, _fill, has_block_fp8=False)
