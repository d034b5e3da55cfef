"""Latent attention (MLA) on a CPU, where a prompt without a prefix is computed with the keys and values of each head.

The cache has latents, which all heads share. SGLang's torch-native backend looks into the cache in any case, and takes the
latents for keys. It fails on that, or computes something else where the sizes happen to fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_patches import hooks


def register() -> None:
    hooks.hook("layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend", _extend)


def _extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **named: Any,
) -> torch.Tensor:
    # Keys that are not saved are those of the heads: the latents have been saved already.
    if save_kv_cache or k is None or not _has_latents(backend.token_to_kv_pool):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **named)
    heads, lengths = layer.tp_q_head_num, forward_batch.extend_seq_lens.tolist()
    return attend(
        q.view(-1, heads, layer.qk_head_dim),
        k.view(-1, heads, layer.qk_head_dim),
        v.view(-1, heads, layer.v_head_dim),
        lengths,
        layer.scaling,
    ).view(q.shape[0], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scaling: float) -> torch.Tensor:
    """Causal attention of sequences that lie one after the other, each ``[tokens, heads, size]``. Rows after the last are
    padding."""
    output = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        begin += length
        query, key, value = (each[rows].transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        result = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        output[rows] = result.squeeze(0).transpose(0, 1)
    return output


def _has_latents(pool: Any) -> bool:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return isinstance(pool, MLATokenToKVPool)
