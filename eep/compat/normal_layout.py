"""Where the tokens of a normal dispatch go and where they come from, as DeepEP's tensors say. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from eep.compat.checks import device_of

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""In bf16, or in fp8 with their scales."""
NormalHandle = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""``(rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx, is_token_in_rank, send_head)``.
There is one channel: tokens go in the order of ranks, then of tokens."""


def dispatch_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many tokens go to each rank and to each expert, and which go to which rank."""
    chosen = topk_idx >= 0
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_idx.device)
    ones = torch.ones_like(topk_idx, dtype=torch.int32)
    # What is chosen by none is counted behind the last expert.
    per_expert.scatter_add_(0, torch.where(chosen, topk_idx, num_experts).flatten(), ones.flatten())
    in_rank = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    rank = torch.where(chosen, topk_idx // (num_experts // num_ranks), num_ranks)
    in_rank.scatter_(1, rank, True)
    is_token_in_rank = in_rank[:, :num_ranks].contiguous()
    return is_token_in_rank.sum(0, dtype=torch.int32), per_expert[:num_experts].contiguous(), is_token_in_rank


@dataclasses.dataclass(frozen=True, slots=True)
class Routes:
    """What one rank sends to, and receives from, each rank."""

    is_token_in_rank: torch.Tensor
    tokens: torch.Tensor
    """The tokens that are sent, those for rank 0 first."""
    send: list[int]
    receive: list[int]

    @classmethod
    def of(cls, is_token_in_rank: torch.Tensor, rank_prefix_matrix: torch.Tensor, rank: int) -> Routes:
        """Reads the counts, so that on a GPU the host waits for them."""
        tokens = is_token_in_rank.t().nonzero()[:, 1]
        ends = rank_prefix_matrix[:, rank]
        counts = torch.stack([is_token_in_rank.sum(0), ends - ends.roll(1).index_fill(0, ends.new_zeros(1).long(), 0)])
        send, receive = counts.tolist()
        return cls(is_token_in_rank, tokens, send, receive)

    @classmethod
    def of_handle(cls, handle: NormalHandle, rank: int) -> Routes:
        """Those of the dispatch that left ``handle``."""
        return cls.of(handle[4], handle[0], rank)

    @property
    def received(self) -> int:
        return sum(self.receive)


def make_handle(routes: Routes, rank_prefix_matrix: torch.Tensor, recv_src_idx: torch.Tensor) -> NormalHandle:
    routed = routes.is_token_in_rank
    to_rank = routed.sum(0, dtype=torch.int32).unsqueeze(1)
    order = routed.cumsum(0, dtype=torch.int32) - 1
    return (
        rank_prefix_matrix,
        to_rank,
        torch.zeros_like(to_rank),
        recv_src_idx,
        routed,
        torch.where(routed, order, -1).to(torch.int32),
    )


def local_choices(topk_idx: torch.Tensor, weights: torch.Tensor, rank: int, local_experts: int) -> tuple[Any, Any]:
    """Received choices as experts of this rank: -1, of weight 0, for those elsewhere."""
    local = topk_idx - rank * local_experts
    is_here = (local >= 0) & (local < local_experts) & (topk_idx >= 0)
    return torch.where(is_here, local, -1), torch.where(is_here, weights, 0.0)


def sum_by_token(rows: torch.Tensor, routes: Routes, start: torch.Tensor) -> torch.Tensor:
    """Adds to ``start``, fp32 ``[tokens, ...]``, what each rank gave for each token, in rank order."""
    first = 0
    for count in routes.send:
        at = routes.tokens[first : first + count]
        start[at] += rows[first : first + count].float()  # a rank gives one row for a token
        first += count
    return start


def parts_of(x: Tokens) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values of tokens, and their scales if they have any."""
    if not isinstance(x, tuple):
        device_of("x", x)
        return x, None
    if len(x) != 2:
        raise ValueError(f"x must be a tensor, or a pair of fp8 values and their scales, got {len(x)} parts")
    for name, each in zip(("the values of x", "the scales of x"), x, strict=True):
        device_of(name, each)
    return x


def padded(rows: torch.Tensor, count: int, value: int) -> torch.Tensor:
    """``rows`` and as many of ``value`` as make ``count``."""
    if len(rows) >= count:
        return rows
    more = torch.full((count, *rows.shape[1:]), value, dtype=rows.dtype, device=rows.device)
    more[: len(rows)] = rows
    return more
