"""``eep.dispatch`` and ``eep.combine``: the two kernels as ``torch.library`` operators.

The operators name the buffer by number, so that they can be traced, captured and compiled around. To a compiler they are
functions: what a dispatch returns is memory of the buffer, which stands until the next dispatch on its channel.
Everything else is :class:`eep.Buffer`'s; code that needs no operators may call its methods directly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from eep.data_plane.buffer import Buffer, find_buffer
from eep.data_plane.tokens import ExpertTokens, RankTokens, Sent

_library = torch.library.Library("eep", "DEF")
_library.define(
    "dispatch(int buffer, int channel, Tensor x, Tensor topk_idx, Tensor? topk_weights) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "combine(int buffer, int channel, Tensor x, Tensor topk_idx, Tensor? topk_weights, Tensor[] received) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _dispatch(
    buffer: int, channel: int, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
) -> list[torch.Tensor]:
    return _tensors_of(find_buffer(buffer).dispatch(x, topk_idx, topk_weights, channel=channel))


def _fake_dispatch(
    buffer: int, channel: int, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
) -> list[torch.Tensor]:
    home = find_buffer(buffer)
    real = _tensors_of(home.tokens_of(Sent(topk_idx, topk_weights, home.wire, channel)))
    return [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=x.device) for t in real]


def _combine(
    buffer: int,
    channel: int,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    received: list[torch.Tensor],
) -> torch.Tensor:
    # `received` only ties the two operators together; the kernel knows where the tokens lie.
    home = find_buffer(buffer)
    return home.combine(x, home.tokens_of(Sent(topk_idx, topk_weights, home.wire, channel)))


def _fake_combine(
    buffer: int,
    channel: int,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    received: list[torch.Tensor],
) -> torch.Tensor:
    return x.new_empty(topk_idx.shape[0], x.shape[-1])


for _name, _kernel, _fake in (("dispatch", _dispatch, _fake_dispatch), ("combine", _combine, _fake_combine)):
    for _device in ("CPU", "CUDA"):  # a buffer knows where it lives; the call is the same
        _library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"eep::{_name}", _fake, lib=_library)


def dispatch(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    channel: int = 0,
) -> RankTokens | ExpertTokens:
    """As :meth:`eep.Buffer.dispatch`, through the operator ``eep::dispatch``."""
    received = torch.ops.eep.dispatch(buffer.id, channel, x, topk_idx, topk_weights)
    fields: list[Any] = [*received] if buffer.wire.startswith("fp8") else [received[0], None, *received[1:]]
    kind = RankTokens if buffer.layout == "rank" else ExpertTokens
    return kind(Sent(topk_idx, topk_weights, buffer.wire, channel), *fields)


def combine(buffer: Buffer, x: torch.Tensor, tokens: RankTokens | ExpertTokens) -> torch.Tensor:
    """As :meth:`eep.Buffer.combine`, through the operator ``eep::combine``."""
    sent = tokens.sent
    output: torch.Tensor = torch.ops.eep.combine(
        buffer.id, sent.channel, x, sent.topk_idx, sent.topk_weights, _tensors_of(tokens)
    )
    return output


def _tensors_of(tokens: RankTokens | ExpertTokens) -> list[torch.Tensor]:
    """What a dispatch gives, in the order of the fields; an operator cannot return "no scales"."""
    values = [getattr(tokens, field.name) for field in dataclasses.fields(tokens)[1:]]
    return [value for value in values if value is not None]
