"""The model whose gates are uneven, and what the benchmark makes of its figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bench.balance.gained import RANKS, SLOTS, PlacedTurn, compare, gains, page
from bench.balance.skewed_model import SIZE, held_by_first_alone, make_skewed_model
from sglang_patches.rank.expert_location import experts_in_slots, initial_placement

HEAD = {
    "command": "python -m bench.balance.gained",
    "commit": "abc",
    "date": "2026-01-01",
    "machine": {"cpu": "a cpu", "cores": 2, "python": "3", "torch": "2"},
    "setting": {"favour": 3.0, "clients": 8, "sglang": "0.5"},
    "requests": {"answered": 500, "failed": 0, "wrong": 0},
}
FIRST = PlacedTurn(False, 100.0, 0.77, 0.8, 0.5, 0.6, 0.01)
MOVED = PlacedTurn(True, 140.0, 0.5, 0.8, 0.1, 0.45, 0.02)


def test_the_favoured_experts_are_those_of_the_first_rank_alone() -> None:
    placement = initial_placement(SIZE.layers, SIZE.experts, SLOTS, RANKS, RANKS)
    favoured = held_by_first_alone(RANKS, SLOTS)
    assert len(favoured) == SIZE.layers
    for layer, experts in enumerate(favoured):
        first, second = (set(experts_in_slots(placement, rank, layer)) for rank in range(RANKS))
        assert set(experts) == first - second
        assert len(experts) > SIZE.top_k, "a gate can pick such experts alone"


def test_the_favoured_experts_have_wider_scores_in_every_layer(tmp_path: Path) -> None:
    favoured = [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]] * (SIZE.layers // 2)
    tensors = load_file(make_skewed_model(tmp_path / "model", 3.0, favoured) / "model.safetensors")
    for layer, experts in enumerate(favoured):
        gate = tensors[f"model.layers.{layer}.mlp.gate.weight"].float()
        others = [expert for expert in range(SIZE.experts) if expert not in experts]
        assert 2.5 < gate[experts].std() / gate[others].std() < 3.5


def test_what_ranks_did_between_two_readings() -> None:
    before = [{"steps": 0.0, "at": 5.0, "rows": 0.0, "picks": 0.0, "experts": 0.0, "waits": 0.0}] * 2
    after = [
        {"steps": 9.0, "at": 7.0, "rows": 200.0 * SIZE.layers, "picks": 300.0, "experts": 1.5, "waits": 0.1},
        {"steps": 9.0, "at": 7.0, "rows": 100.0 * SIZE.layers, "picks": 100.0, "experts": 0.5, "waits": 1.2},
    ]
    assert compare(True, before, after, 0.25) == PlacedTurn(True, 150.0, 0.75, 0.75, 0.6, 5.0, 0.25)


def test_a_turn_is_compared_with_those_around_it() -> None:
    told = [FIRST, MOVED, replace(FIRST, tokens_per_second=180.0), MOVED, replace(FIRST, tokens_per_second=100.0)]
    assert gains(told, lambda each: each.tokens_per_second) == pytest.approx([1.0, 1.0])


def test_the_page_says_what_is_gained() -> None:
    text = page(HEAD, [FIRST, MOVED, FIRST])
    assert "| moved | 140 | 50% | 80% | 10% | 0.450 | 2% |" in text
    assert "of 1: 1.40 (1.40 to 1.40) times as many tokens" in text
    assert "take 0.75 (0.75 to 0.75) times as much processor time" in text
    assert "say little" not in text


def test_the_page_warns_where_the_machine_had_other_things_to_do() -> None:
    assert "took up to 30% of the machine" in page(HEAD, [FIRST, replace(MOVED, others_share=0.3), FIRST])
