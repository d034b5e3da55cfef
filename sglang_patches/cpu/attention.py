"""On a CPU, a few tokens after a prefix that is in the cache cost what as many decodes cost.

SGLang's torch-native attention computes all rows of a sequence when it extends one, also those of the prefix, and drops
these. A request whose context was restored extends it by a token or two: that would cost as much as the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_patches import hooks

FEW = 32
"""So many tokens, one by one, are sooner computed than a prefix that is worth restoring. The copy of a context in host memory
has whole pages of 16 tokens, and may be one page behind."""


def register() -> None:
    hooks.hook("layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend", _extend)


def _extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    *more: Any,
    **named: Any,
) -> torch.Tensor:
    """Each sequence by itself, as the original has them too."""
    caches = (k_cache, v_cache, req_to_token)
    new, prefixes = extend_seq_lens.tolist(), extend_prefix_lens.tolist()
    are_few = [prefix > 0 and count <= FEW for count, prefix in zip(new, prefixes, strict=True)]
    has_encoder = any(each is not None for each in more) or named.get("encoder_lens") is not None
    if has_encoder or not named.get("causal") or not any(are_few):
        of_all = (req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens)
        return original(backend, query, output, *caches, *of_all, *more, **named)
    begin = 0
    for number, (count, is_few) in enumerate(zip(new, are_few, strict=True)):
        this, rows = slice(number, number + 1), slice(begin, begin + count)
        begin += count
        if not is_few:
            lengths = (seq_lens[this], extend_prefix_lens[this], extend_seq_lens[this])
            original(backend, query[rows], output[rows], *caches, req_pool_indices[this], *lengths, *more, **named)
            continue
        # The keys of all new tokens are in the cache: each looks at those up to its own.
        up_to = prefixes[number] + 1 + torch.arange(count, dtype=seq_lens.dtype)
        of_each = (req_pool_indices[this].expand(count), up_to)
        backend._run_sdpa_forward_decode(
            query[rows], output[rows], *caches, *of_each, *more, **{**named, "causal": False}
        )
    return output
