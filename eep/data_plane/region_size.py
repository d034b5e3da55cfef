"""How much memory a rank takes for the exchange of tokens, by what its buffer is made for. Decisions only.

The sums are those of ``eep_cuda/include/eep/protocol.h``. They need no library, and go beyond the number of ranks that it
knows.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable

from eep.abi.native import MAX_TOKENS, SCALE_GROUP, Mailbox
from eep.abi.peer_table import INCARNATIONS
from eep.data_plane.buffer_shape import BufferShape
from eep.data_plane.tokens import ROW_DTYPES

MOST_REGION = 4 << 30
"""Unless somebody says how many tokens a region has room for, it is no larger than that many bytes."""
LEAST_PORTION = 128
"""But it has room for so many tokens of each rank. Experts would hardly be busy with fewer."""

_PAGE = 4096
_WORD = 4
"""Bytes of a slot number, of a weight and of a scale."""
_ENCODED_UNIT = 16
"""Encoded rows take a multiple of so many bytes."""


def region_bytes(shape: BufferShape) -> int:
    """What peers map: the memory of :attr:`eep.data_plane.endpoint.Endpoint.region`."""
    slots = shape.max_ranks * INCARNATIONS
    rows = slots * shape.max_tokens
    outbox_rows = rows if shape.layout == "rank" else shape.max_ranks * shape.max_tokens * shape.topk
    parts = (
        slots * ctypes.sizeof(Mailbox) + 64,
        rows * shape.topk * _WORD,
        rows * shape.topk * _WORD,
        rows * _row_bytes(shape),
        rows * _scale_bytes(shape),
        outbox_rows * _outbox_row_bytes(shape),
    )
    return shape.channels * sum(-(-size // _PAGE) * _PAGE for size in parts)


def mirror_bytes(shape: BufferShape) -> int:
    """What a mirror of one peer on another host takes: the part of the peer's region that is for this rank, but for the
    rows on their way out, which lie in the region of this rank."""
    outbox_rows = shape.max_tokens * (1 if shape.layout == "rank" else shape.topk)
    return shape.channels * (shape.max_tokens * 2 * shape.topk * _WORD + outbox_rows * _outbox_row_bytes(shape))


def packed_bytes(shape: BufferShape) -> int:
    """What a rank takes beside its region. In the expert layout the rows of each expert lie together, before it and after."""
    rows = shape.max_ranks * shape.max_tokens
    if shape.layout == "rank":
        staged = _output_row_bytes(shape) if shape.combine == "fp8" else 0
        return shape.channels * INCARNATIONS * rows * (shape.topk * 2 * _WORD + staged)
    row = _row_bytes(shape) + _scale_bytes(shape) + _output_row_bytes(shape) + _WORD
    return shape.channels * shape.local_experts * rows * row


def choose_room(most: int, asked: int | None, region: Callable[[int], int]) -> int:
    """For how many tokens of each rank a region has room. ``most``: how many a rank may have in a step; ``asked``: what the
    operator wants; ``region``: how many bytes a region with room for so many tokens has."""
    most = min(most, MAX_TOKENS)
    if asked is not None:
        return min(asked, most)
    if region(most) <= MOST_REGION:
        return most
    fits = bisect.bisect_right(range(1, most + 1), MOST_REGION, key=region)
    return min(most, max(LEAST_PORTION, fits))


def _row_bytes(shape: BufferShape) -> int:
    return shape.hidden * ROW_DTYPES[shape.wire].itemsize


def _scale_bytes(shape: BufferShape) -> int:
    return shape.hidden // SCALE_GROUP * _WORD


def _outbox_row_bytes(shape: BufferShape) -> int:
    if shape.combine == "fp8":
        return -(-(shape.hidden + _scale_bytes(shape)) // _ENCODED_UNIT) * _ENCODED_UNIT
    return _output_row_bytes(shape)


def _output_row_bytes(shape: BufferShape) -> int:
    return shape.hidden * shape.combine_dtype.itemsize
