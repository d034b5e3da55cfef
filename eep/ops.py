"""``eep.dispatch`` and ``eep.combine``: the two kernels as ``torch.library`` operators.

The operators name the buffer by number and say which tensors they write, so that they can be traced, captured and
compiled around. Everything else is :class:`eep.Buffer`'s; code that needs no operators may call its methods directly.
"""

from __future__ import annotations

import torch

from eep.buffer import Buffer, find_buffer
from eep.received import ExpertTokens, RankTokens, Sent

_library = torch.library.Library("eep", "DEF")
_library.define(
    "dispatch(int buffer, int channel, str wire, Tensor x, Tensor topk_idx, Tensor? topk_weights, "
    "Tensor(a!)[] received) -> ()"
)
_library.define(
    "combine(int buffer, int channel, str wire, Tensor x, Tensor topk_idx, Tensor? topk_weights, "
    "Tensor[] received, Tensor(a!) out) -> ()"
)


def _dispatch(
    buffer: int,
    channel: int,
    wire: str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    received: list[torch.Tensor],
) -> None:
    find_buffer(buffer).dispatch(x, topk_idx, topk_weights, channel=channel, wire=wire)


def _combine(
    buffer: int,
    channel: int,
    wire: str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    received: list[torch.Tensor],
    out: torch.Tensor,
) -> None:
    home = find_buffer(buffer)
    home.combine(x, home.tokens_of(Sent(topk_idx, topk_weights, wire, channel)), out=out)


_library.impl("dispatch", _dispatch, "CPU")
_library.impl("combine", _combine, "CPU")


@torch.library.register_fake("eep::dispatch", lib=_library)
def _(buffer, channel, wire, x, topk_idx, topk_weights, received) -> None:  # type: ignore[no-untyped-def]
    pass


@torch.library.register_fake("eep::combine", lib=_library)
def _(buffer, channel, wire, x, topk_idx, topk_weights, received, out) -> None:  # type: ignore[no-untyped-def]
    pass


def dispatch(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    channel: int = 0,
) -> RankTokens | ExpertTokens:
    """As :meth:`eep.Buffer.dispatch`, through the operator ``eep::dispatch``."""
    tokens = buffer.tokens_of(Sent(topk_idx, topk_weights, buffer.wire, channel))
    torch.ops.eep.dispatch(buffer.id, channel, buffer.wire, x, topk_idx, topk_weights, _tensors_of(tokens))
    return tokens


def combine(
    buffer: Buffer, x: torch.Tensor, tokens: RankTokens | ExpertTokens, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As :meth:`eep.Buffer.combine`, through the operator ``eep::combine``."""
    sent = tokens.sent
    if out is None:
        out = x.new_empty(sent.topk_idx.shape[0], buffer.hidden)
    torch.ops.eep.combine(
        buffer.id, sent.channel, sent.wire, x, sent.topk_idx, sent.topk_weights, _tensors_of(tokens), out
    )
    return out


def _tensors_of(tokens: RankTokens | ExpertTokens) -> list[torch.Tensor]:
    """What a dispatch writes."""
    if isinstance(tokens, RankTokens):
        written = [tokens.x, tokens.topk_idx, tokens.topk_weights, tokens.rank_counts]
    else:
        written = [tokens.x, tokens.expert_counts, tokens.src_info, tokens.layout_range, tokens.rank_counts]
    return written if tokens.scales is None else [*written, tokens.scales]
