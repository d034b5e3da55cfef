"""Every MoE layer has its redundant slots, whether its model asks for them or not."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_patches import options
from sglang_patches.rank import layer_slots


def test_slots_that_a_model_forgets_are_added() -> None:
    assert layer_slots.count_slots(16, 16, 8) == 24
    assert layer_slots.count_slots(24, 16, 8) == 24
    assert layer_slots.count_slots(16, 16, 0) == 16
    assert layer_slots.count_slots(16, None, 8) == 16, "nothing is known of this model"


def test_experts_that_the_configuration_does_not_know_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"has 17 experts, and its configuration says 16"):
        layer_slots.count_slots(17, 16, 8)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_layer_is_built_with_them(monkeypatch: pytest.MonkeyPatch, by_name: bool) -> None:
    built: list[Any] = []

    def build(layer: object, num_experts: int, hidden_size: int) -> None:
        built.append((layer, num_experts, hidden_size))

    monkeypatch.setattr(
        options,
        "required",
        lambda: options.ServerOptions(ranks=4, max_ranks=4, experts=16, redundant_experts=8),
    )
    if by_name:
        layer_slots._build(build, "layer", num_experts=16, hidden_size=64)
    else:
        layer_slots._build(build, "layer", 16, 64)
    assert built == [("layer", 24, 64)]
