"""What a rank knows of the model: MoE layers announce themselves, and then the experts are placed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_patches.options import ServerOptions
from sglang_patches.rank.model_facts import ModelFacts
from sglang_patches.rank.token_forms import MoeShape

SHAPE = MoeShape(experts=16, slots_per_rank=8, hidden=64, topk=2, dtype=torch.bfloat16)


@pytest.fixture
def facts() -> ModelFacts:
    return ModelFacts(1, "cpu", (8,), ServerOptions(ranks=2, max_ranks=2))


def test_layers_are_numbered_in_the_order_in_which_they_are_built(facts: ModelFacts) -> None:
    assert [facts.add_layer(layer_id, SHAPE) for layer_id in (3, 5)] == [0, 1]
    assert facts.layer_ids == [3, 5]
    assert (facts.first_placement.layers, facts.first_placement.experts) == (2, 16)


def test_two_ranks_load_every_expert_between_them(facts: ModelFacts) -> None:
    facts.add_layer(3, SHAPE)
    other = replace(facts, rank=0)
    assert sorted([*other.experts_to_load(3), *facts.experts_to_load(3)]) == list(range(16))


def test_layers_that_differ_are_refused(facts: ModelFacts) -> None:
    facts.add_layer(3, SHAPE)
    with pytest.raises(SystemExit, match="MoE layers of this model differ"):
        facts.add_layer(5, replace(SHAPE, topk=4))
    assert facts.layer_ids == [3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_tokens_of_another_type_are_refused(facts: ModelFacts, dtype: torch.dtype) -> None:
    with pytest.raises(SystemExit, match=r"float32 or bfloat16.*--dtype bfloat16"):
        facts.add_layer(0, replace(SHAPE, dtype=dtype))
    assert facts.layer_ids == []


def test_a_model_without_experts_is_refused(facts: ModelFacts) -> None:
    with pytest.raises(SystemExit, match="has no experts"):
        _ = facts.first_placement


def test_no_layer_comes_after_the_experts_are_placed(facts: ModelFacts) -> None:
    facts.add_layer(3, SHAPE)
    _ = facts.first_placement
    with pytest.raises(RuntimeError, match="MoE layer 5 was built after the experts were placed"):
        facts.add_layer(5, SHAPE)
