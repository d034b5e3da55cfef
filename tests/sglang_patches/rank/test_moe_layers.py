"""What the plugin makes of the MoE layers of a model, and which layers it refuses. The layers are made up: no model with
such layers is small enough, or runs on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_patches import options
from sglang_patches.rank import dispatcher, expert_weights, model_facts, rank_data_plane
from sglang_patches.rank.token_forms import MoeShape


def runner(**changes: Any) -> SimpleNamespace:
    """How SGLang describes the kernels of a layer."""
    known = {
        "num_experts": 24,
        "num_local_experts": 6,
        "hidden_size": 64,
        "top_k": 2,
        "params_dtype": torch.bfloat16,
        "layer_id": 3,
        "routed_scaling_factor": 2.5,
    }
    return SimpleNamespace(**{**known, **changes})


def test_kernels_do_not_scale_what_the_model_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[tuple[int, MoeShape]] = []
    facts = SimpleNamespace(add_layer=lambda layer, shape: layers.append((layer, shape)) or 0)
    monkeypatch.setattr(model_facts, "get_facts", lambda: facts)
    monkeypatch.setattr(rank_data_plane, "get_plane", lambda: None)
    monkeypatch.setattr(options, "required", lambda: SimpleNamespace(redundant_experts=8, most_slots=0))
    monkeypatch.setattr(dispatcher, "make_dispatcher", lambda plane, layer: layer)
    described = runner()
    assert dispatcher._create(described) == 0
    assert layers == [(3, MoeShape(16, 6, 64, 2, torch.bfloat16))]
    assert described.routed_scaling_factor is None


class Layer(torch.nn.Module):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros((6, 8, 4)))
        self.w13_input_scale = torch.nn.Parameter(scale)


def test_a_scale_of_all_experts_that_were_loaded_is_refused() -> None:
    placement: Any = SimpleNamespace(slots_per_rank=6)
    with pytest.raises(SystemExit, match=r"w13_input_scale is one for all experts"):
        expert_weights.adopt([Layer(torch.tensor(0.5))], placement, 0, "cpu")
