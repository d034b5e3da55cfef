"""What a dispatch gives: tensors at fixed addresses, one set per channel, and where they come from.

In the ``rank`` layout the token rows are used where the sources wrote them, in this rank's own region. In the ``expert``
layout they are packed per local expert into tensors made once. Either way the addresses never change, so that a captured
graph may hold them, and the contents stand until the next dispatch on the same channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eep.abi.native import LAYOUTS, SCALE_GROUP, TYPES, RegionLayout, Shape
from eep.data_plane.memory import Memory

ROW_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_pow2": torch.float8_e4m3fn,
    "fp8_ue8m0": torch.float8_e4m3fn,
}
WIRE_NAMES = {value: name for name, value in TYPES.items()}


@dataclass(frozen=True, slots=True)
class Sent:
    """A dispatch in flight: what combine needs to know of it."""

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    wire: str
    channel: int


@dataclass(frozen=True, slots=True)
class RankTokens:
    """Tokens by source, row ``slot * max_tokens + token``. Rows for which ``topk_idx`` is -1 throughout hold nothing."""

    sent: Sent
    x: torch.Tensor
    """``[slots * max_tokens, hidden]`` in the type of the wire."""
    scales: torch.Tensor | None
    """fp8: ``[slots * max_tokens, hidden / 128]``, fp32 or exponent bytes."""
    topk_idx: torch.Tensor
    """int32 ``[slots * max_tokens, topk]``: which local experts a token wants, -1 for those elsewhere."""
    topk_weights: torch.Tensor
    rank_counts: torch.Tensor
    """int32 ``[max_ranks]``: how many tokens each rank dispatched; 0 if it was dropped."""

    def rows(self) -> torch.Tensor:
        """The rows that hold a token for an expert here (a shape that depends on the data: not for graphs)."""
        return (self.topk_idx >= 0).any(dim=1).nonzero().squeeze(1)


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """Tokens by local expert, the valid rows of each first, sources in rank order."""

    sent: Sent
    x: torch.Tensor
    """``[local_experts, max_ranks * max_tokens, hidden]`` in the type of the wire."""
    scales: torch.Tensor | None
    """fp8: fp32 ``[..., hidden / 128]``, or four exponents to an int32 ``[..., hidden / 512]``; column-major."""
    expert_counts: torch.Tensor
    """int32 ``[local_experts]``: how many rows of each expert are valid."""
    src_info: torch.Tensor
    """int32 ``[local_experts, max_ranks * max_tokens]``: the index of each row's token at its source."""
    layout_range: torch.Tensor
    """int64 ``[local_experts, max_ranks]``: ``begin << 32 | count`` of the rows that came from each rank."""
    rank_counts: torch.Tensor


class ChannelTensors:
    """The tensors of one channel and every view of them that a dispatch gives, made once."""

    def __init__(self, shape: Shape, at: RegionLayout, region: Memory, channel: int, device: torch.device) -> None:
        self._shape = shape
        self._at = at
        self._region = region
        self._start = channel * at.channel_bytes
        self._rank_counts = torch.zeros(shape.max_ranks, dtype=torch.int32, device=device)
        encodes = WIRE_NAMES[shape.combine_type] == "fp8"
        combine_dtype = torch.bfloat16 if encodes else ROW_DTYPES[WIRE_NAMES[shape.combine_type]]
        self._views: dict[tuple[str, int], tuple[torch.Tensor | None, ...]] = {}
        if shape.layout == LAYOUTS["rank"]:
            rows = at.slots * shape.max_tokens
            self._topk_idx = torch.full((rows * shape.max_topk,), -1, dtype=torch.int32, device=device)
            self._topk_weights = torch.zeros(rows * shape.max_topk, dtype=torch.float32, device=device)
            if encodes:  # on the way into the outbox
                self.outputs = torch.empty(rows, shape.hidden, dtype=combine_dtype, device=device)
            else:
                outbox = self._in_region(at.outbox, rows * at.outbox_row_bytes)
                self.outputs = outbox.view(combine_dtype).view(rows, -1)
        else:
            experts, rows = shape.local_experts, shape.max_ranks * shape.max_tokens
            # Never written before a dispatch says which rows count; the memory is not even there until then.
            self._packed = torch.empty(experts * rows * at.row_bytes, dtype=torch.uint8, device=device)
            self._packed_scales = torch.empty(experts * rows * at.scale_bytes, dtype=torch.uint8, device=device)
            self._expert_counts = torch.zeros(experts, dtype=torch.int32, device=device)
            self._src_info = torch.zeros(experts, rows, dtype=torch.int32, device=device)
            self._layout_range = torch.zeros(experts, shape.max_ranks, dtype=torch.int64, device=device)
            self.outputs = torch.empty(experts, rows, shape.hidden, dtype=combine_dtype, device=device)
        for topk in range(1, shape.max_topk + 1):
            self._view(WIRE_NAMES[shape.wire_type], topk)

    def tokens(self, sent: Sent) -> RankTokens | ExpertTokens:
        """Where the tokens that others send lie."""
        kind = RankTokens if self._shape.layout == LAYOUTS["rank"] else ExpertTokens
        return kind(sent, *self._view(sent.wire, sent.topk_idx.shape[1]))  # type: ignore[arg-type]

    def _view(self, wire: str, topk: int) -> tuple[torch.Tensor | None, ...]:
        if (wire, topk) not in self._views:
            by_rank = self._shape.layout == LAYOUTS["rank"]
            self._views[wire, topk] = self._rank_view(wire, topk) if by_rank else self._expert_view(wire)
        return self._views[wire, topk]

    def _rank_view(self, wire: str, topk: int) -> tuple[torch.Tensor | None, ...]:
        shape, at = self._shape, self._at
        rows = at.slots * shape.max_tokens
        x = self._in_region(at.rows, rows * at.row_bytes).view(ROW_DTYPES[wire]).view(rows, shape.hidden)
        scales = None
        if wire.startswith("fp8"):
            scales = self._in_region(at.scales, rows * at.scale_bytes).view(rows, -1)
            groups = shape.hidden // SCALE_GROUP
            scales = scales[:, :groups] if wire == "fp8_ue8m0" else scales.view(torch.float32)
        idx, weights = (flat[: rows * topk].view(rows, topk) for flat in (self._topk_idx, self._topk_weights))
        return x, scales, idx, weights, self._rank_counts

    def _expert_view(self, wire: str) -> tuple[torch.Tensor | None, ...]:
        experts, rows = self._src_info.shape
        dtype, hidden = ROW_DTYPES[wire], self._shape.hidden
        x = self._packed[: experts * rows * hidden * dtype.itemsize].view(dtype).view(experts, rows, hidden)
        scales = None
        if wire.startswith("fp8"):
            packs = wire == "fp8_ue8m0"
            words = hidden // SCALE_GROUP // (4 if packs else 1)
            flat = self._packed_scales[: experts * rows * words * 4].view(torch.int32 if packs else torch.float32)
            scales = flat.view(experts, words, rows).transpose(1, 2)
        return x, scales, self._expert_counts, self._src_info, self._layout_range, self._rank_counts

    def _in_region(self, offset: int, size: int) -> torch.Tensor:
        return self._region.bytes_at(self._start + offset, size)
