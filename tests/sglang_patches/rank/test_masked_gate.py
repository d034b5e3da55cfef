"""No gate picks an expert that no slot holds, as long as there are enough others."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_patches.rank import masked_gate, model_facts, rank_data_plane

pytest.importorskip("sglang")
TOKENS, EXPERTS, TOP_K, LAYER = 64, 16, 4, 7

GATES: dict[str, dict[str, Any]] = {
    "softmax": {"scoring_func": "softmax"},
    "softmax, as it is": {"scoring_func": "softmax", "renormalize": False},
    "sigmoid": {"scoring_func": "sigmoid"},
    "groups": {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2},
    "bias": {"scoring_func": "sigmoid", "biased": True},
    "bias and groups": {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "biased": True},
    "bias and one group": {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "biased": True},
}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Some gates of SGLang would be compiled, which takes long and changes nothing."""
    from sglang_patches import cpu

    cpu.fill_gaps()
    with torch.compiler.set_stance("force_eager"):
        yield


def gate(biased: bool = False, **settings: Any) -> Any:
    """SGLang's description of a gate."""
    from sglang.srt.layers.moe.topk import TopKConfig

    # The bias makes the masked experts of the tests the best ones: what is masked by its score alone is picked.
    bias = torch.linspace(2.0, -2.0, EXPERTS) if biased else None
    return TopKConfig(top_k=TOP_K, correction_bias=bias, torch_native=True, **settings)


def logits() -> torch.Tensor:
    return 3 * torch.randn((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(1))


def select(monkeypatch: pytest.MonkeyPatch, config: Any, masked: list[int], scores: torch.Tensor) -> Any:
    """What a rank selects, through the hook."""
    from sglang.srt.layers.moe import topk

    table = torch.zeros((1, EXPERTS), dtype=torch.bool)
    table[0, masked] = True
    plane = SimpleNamespace(location=SimpleNamespace(tables=SimpleNamespace(masked=table)))
    monkeypatch.setattr(model_facts, "get_facts", lambda: SimpleNamespace(layer_ids=[LAYER]))
    monkeypatch.setattr(rank_data_plane, "get_plane", lambda: plane)
    recorder = SimpleNamespace(on_select_experts=lambda **_: None)
    monkeypatch.setattr(topk, "get_global_expert_distribution_recorder", lambda: recorder)
    return masked_gate._select(topk.select_experts, torch.zeros((TOKENS, 8)), scores, config, layer_id=LAYER)


@pytest.mark.parametrize("kind", GATES)
def test_masked_experts_are_not_picked(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of each group half is left, and of one nothing: two groups may not have enough for a token."""
    masked = [0, 1, 2, 3, 4, 5, 6, 8, 9, 12, 13]
    found = select(monkeypatch, gate(**GATES[kind]), masked, logits())
    assert not set(found.topk_ids.flatten().tolist()) & set(masked)
    assert all(len(set(row)) == TOP_K for row in found.topk_ids.tolist()), "different experts"
    assert (found.topk_weights > 0).all()
    if GATES[kind].get("renormalize", True):
        torch.testing.assert_close(found.topk_weights.sum(dim=1), torch.ones(TOKENS))


@pytest.mark.parametrize("kind", GATES)
def test_while_none_is_masked_sglangs_choice_stands(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from sglang.srt.layers.moe import topk

    config, scores = gate(**GATES[kind]), logits()
    found = select(monkeypatch, config, [], scores)
    wanted = topk.select_experts(torch.zeros((TOKENS, 8)), scores, config, layer_id=LAYER)
    assert torch.equal(found.topk_ids, wanted.topk_ids)
    assert torch.equal(found.topk_weights, wanted.topk_weights)
    # Ours would have been the same, so a mask changes only what it must.
    weights, ids = masked_gate.choose_unmasked(scores, torch.zeros(EXPERTS, dtype=torch.bool), config)
    assert torch.equal(ids.sort().values, wanted.topk_ids.long().sort().values)
    ordered, wanted_order = (each.argsort() for each in (ids, wanted.topk_ids))
    torch.testing.assert_close(weights.gather(1, ordered), wanted.topk_weights.gather(1, wanted_order))


def test_if_too_few_are_left_the_others_weigh_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = list(range(EXPERTS - 2))
    found = select(monkeypatch, gate(**GATES["bias and groups"]), masked, logits())
    assert ((found.topk_ids >= EXPERTS - 2).sum(dim=1) == 2).all()
    assert (found.topk_weights[found.topk_ids < EXPERTS - 2] == 0).all()
    torch.testing.assert_close(found.topk_weights.sum(dim=1), torch.ones(TOKENS))


def test_padding_and_other_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    config, scores = gate(**GATES["bias"]), logits()
    select(monkeypatch, config, [0], scores)  # sets up the rank
    padded = StandardTopKOutput(torch.ones((TOKENS, TOP_K)), torch.zeros((TOKENS, TOP_K), dtype=torch.int32), scores)
    padded.topk_ids[60:] = -1

    def original(*_: Any, **__: Any) -> Any:
        return padded

    ids = masked_gate._select(original, torch.zeros((TOKENS, 8)), scores, config, layer_id=LAYER).topk_ids
    assert (ids[60:] == -1).all()
    assert (ids[:60] > 0).all()
    assert masked_gate._select(original, torch.zeros((TOKENS, 8)), scores, config, layer_id=3) is padded


def test_a_rank_without_tokens_chooses_nothing() -> None:
    none = torch.zeros((0, EXPERTS))
    weights, ids = masked_gate.choose_unmasked(
        none, torch.ones(EXPERTS, dtype=torch.bool), gate(**GATES["bias and groups"])
    )
    assert weights.shape == ids.shape == (0, TOP_K)


def test_a_way_to_score_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="cosine is no way to score"):
        masked_gate.choose_unmasked(logits(), torch.zeros(EXPERTS, dtype=torch.bool), gate(scoring_func="cosine"))
