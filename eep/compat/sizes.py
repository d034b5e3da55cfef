"""The sizes for which a rank makes its memory, and how a number of bytes stands for them.

DeepEP's constructor is told how many bytes to take, not for what. A program gets that number from the size hint, in the same
process and just before. So the hint remembers what it was asked.
"""

from __future__ import annotations

import dataclasses

from eep.abi import native
from eep.compat.checks import local_experts_of

CHANNELS = 2
WIRE = "bf16"
"""The widest format, for which memory is made. Each dispatch says what it sends."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What all ranks must agree on."""

    max_tokens: int
    hidden: int
    local_experts: int


_hinted: dict[int, Sizes] = {}


def hint(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """The bytes of address space that a rank of ``num_ranks`` shares, for any K."""
    sizes, wire = Sizes(max_tokens, hidden, local_experts_of(num_experts, num_ranks)), native.TYPES[WIRE]
    at, library = native.RegionLayout(), native.load()
    shape = native.Shape(
        num_ranks,
        max_tokens,
        hidden,
        native.MAX_TOPK,
        sizes.local_experts,
        native.LAYOUTS["expert"],
        wire,
        wire,
        CHANNELS,
    )
    native.check(library, library.eep_region_layout_compute(shape, at))
    _hinted[int(at.total_bytes)] = sizes
    return int(at.total_bytes)


def hinted(num_bytes: int) -> Sizes | None:
    """The sizes of the last hint in this process that was ``num_bytes``."""
    return _hinted.get(num_bytes)
