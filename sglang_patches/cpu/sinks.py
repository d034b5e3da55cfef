"""Attention with sinks on a CPU: each head has a score that takes part in the softmax and brings no value (gpt-oss).

SGLang's torch-native backend does not know them, so SGLang does not serve gpt-oss with it. Here a sink is one key more, whose
score is the sink and whose value is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from sglang_patches import hooks

_LIKE = "triton"
"""A backend that SGLang knows to have sinks and windows."""
_sinks: ContextVar[torch.Tensor | None] = ContextVar("sinks", default=None)
"""Those of the layer that is computed."""


def register() -> None:
    from sglang.srt.layers.attention import torch_native_backend

    hooks.hook("layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend", _forward)
    hooks.hook("layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode", _forward)
    hooks.rebind(
        "layers.attention.torch_native_backend.scaled_dot_product_attention",
        functools.partial(attend, torch_native_backend.scaled_dot_product_attention),
    )


def allow() -> None:
    """Have SGLang accept the torch-native backend for a model with sinks, in the process that checks the arguments."""
    try:
        from sglang.srt.arg_groups import model_hook
    except ImportError:
        return  # an older version, which refuses such a model
    hooks.rebind(
        "arg_groups.model_hook.attention_backends_of",
        functools.partial(_backends, model_hook.attention_backends_of),
    )


def _backends(original: Callable[..., tuple[str, ...]], *arguments: Any) -> tuple[str, ...]:
    return tuple(_LIKE if each == "torch_native" else each for each in original(*arguments))


def _forward(
    original: Callable[..., torch.Tensor],
    backend: Any,
    *arguments: Any,
    sinks: torch.Tensor | None = None,
    **named: Any,
) -> torch.Tensor:
    token = _sinks.set(sinks)
    try:
        return original(backend, *arguments, **named)
    finally:
        _sinks.reset(token)


def attend(
    original: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    **named: Any,
) -> torch.Tensor:
    """As ``original``, with the sinks of the layer if it has any. All tensors are ``[1, heads, tokens, size]``."""
    sinks = _sinks.get()
    if sinks is None:
        return original(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **named)
    rows, keys = query.shape[-2], key.shape[-2]
    allowed = torch.ones((rows, keys), dtype=torch.bool) if attn_mask is None else attn_mask
    if is_causal:
        allowed = allowed.tril()
    scores = query.new_zeros((1, query.shape[1], rows, keys + 1))
    scores[..., :keys].masked_fill_(~allowed, float("-inf"))
    scores[..., keys] = sinks.to(scores.dtype).view(1, -1, 1)
    key, value = (torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (key, value))
    return original(query, key, value, attn_mask=scores, **named)
