"""Latent attention without a prefix goes by the keys of the heads; everything else, as SGLang does it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_patches.cpu import latent_attention

HEADS, KEY, VALUE, SCALE = 2, 6, 4, 0.3
LENGTHS = [3, 1, 5]


def test_each_sequence_looks_at_itself_alone() -> None:
    made = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn((sum(LENGTHS) + 2, HEADS, size), generator=made) for size in (KEY, KEY, VALUE))
    found = latent_attention.attend(q, k, v, LENGTHS, SCALE)
    begin = 0
    for length in LENGTHS:
        for row in range(begin, begin + length):
            for head in range(HEADS):
                weights = (k[begin : row + 1, head] @ q[row, head] * SCALE).softmax(dim=0)
                torch.testing.assert_close(found[row, head], weights @ v[begin : row + 1, head])
        begin += length
    assert found[begin:].tolist() == torch.zeros((2, HEADS, VALUE)).tolist(), "padding"


@pytest.mark.parametrize(("saves", "latents"), [(True, True), (False, False), (False, True)])
def test_only_keys_that_are_not_saved_where_latents_are(
    monkeypatch: pytest.MonkeyPatch, saves: bool, latents: bool
) -> None:
    monkeypatch.setattr(latent_attention, "_has_latents", lambda pool: latents)
    layer = SimpleNamespace(tp_q_head_num=HEADS, qk_head_dim=KEY, v_head_dim=VALUE, scaling=SCALE)
    batch = SimpleNamespace(extend_seq_lens=torch.tensor([3]))
    q, k, v = (torch.ones((3, HEADS * size)) for size in (KEY, KEY, VALUE))

    def original(*_: Any, **__: Any) -> torch.Tensor:
        return torch.tensor(7.0)

    backend = SimpleNamespace(token_to_kv_pool=None)
    found = latent_attention._extend(original, backend, q, k, v, layer, batch, saves)
    assert found.shape == ((3, HEADS * VALUE) if latents and not saves else ())
