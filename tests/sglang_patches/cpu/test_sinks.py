"""A sink takes part in the softmax of its head and brings no value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_patches.cpu import sinks

HEADS, KV_HEADS, ROWS, SIZE, SCALE = 4, 2, 5, 8, 0.4
WINDOW = torch.ones((ROWS, ROWS), dtype=torch.bool).tril() & ~torch.ones((ROWS, ROWS), dtype=torch.bool).tril(-2)


def tensors() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(2)
    return [torch.randn((1, heads, ROWS, SIZE), generator=made) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def attend(of_layer: torch.Tensor | None, **named: Any) -> torch.Tensor:
    """As the backend calls it, within a layer that has these sinks."""

    def original(_: object) -> torch.Tensor:
        return sinks.attend(scaled_dot_product_attention, *tensors(), enable_gqa=True, scale=SCALE, **named)

    return sinks._forward(original, "backend", sinks=of_layer)


@pytest.mark.parametrize(
    ("named", "allowed"),
    [
        ({"is_causal": True}, torch.ones((ROWS, ROWS), dtype=torch.bool).tril()),
        ({"attn_mask": WINDOW}, WINDOW),
        ({}, torch.ones((ROWS, ROWS), dtype=torch.bool)),
    ],
    ids=["causal", "window", "all"],
)
def test_a_sink_is_a_score_without_a_value(named: dict[str, Any], allowed: torch.Tensor) -> None:
    of_layer = torch.tensor([0.5, -1.0, 3.0, 10.0], dtype=torch.bfloat16)
    found = attend(of_layer, **named)
    query, key, value = (each[0] for each in tensors())
    for head in range(HEADS):
        of = head * KV_HEADS // HEADS
        scores = (query[head] @ key[of].T * SCALE).masked_fill(~allowed, float("-inf"))
        weights = torch.cat([scores, of_layer[head].float().expand(ROWS, 1)], dim=1).softmax(dim=1)
        torch.testing.assert_close(found[0, head], weights[:, :-1] @ value[of])


def test_without_sinks_nothing_changes() -> None:
    attend(torch.zeros(HEADS))  # those of one layer are not there for the next
    wanted = scaled_dot_product_attention(*tensors(), enable_gqa=True, scale=SCALE, is_causal=True)
    assert torch.equal(attend(None, is_causal=True), wanted)


def test_sglang_takes_the_backend_for_one_with_sinks() -> None:
    assert sinks._backends(lambda _: ("torch_native", "fa3"), None) == ("triton", "fa3")
