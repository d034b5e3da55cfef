"""The workload: the tokens of each rank, the experts they want, and how many bytes that makes.

All of it follows from the shape and the number of a rank, so that each rank knows what its peers must have
sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

SCALE_GROUP = 128
"""Values that share one scale in the fp8 formats."""

WIRES = ("f32", "bf16", "fp8", "fp8_pow2", "fp8_ue8m0")


@dataclass(frozen=True, slots=True)
class Shape:
    """What stays the same throughout a run."""

    hidden: int
    topk: int
    experts: int
    wire: str

    @property
    def input_dtype(self) -> torch.dtype:
        return torch.float32 if self.wire == "f32" else torch.bfloat16

    @property
    def dispatch_row_bytes(self) -> int:
        """One token on its way to a rank: its values and their scales."""
        if not self.wire.startswith("fp8"):
            return self.hidden * self.input_dtype.itemsize
        return self.hidden + self.hidden // SCALE_GROUP * (1 if self.wire == "fp8_ue8m0" else 4)

    @property
    def combine_row_bytes(self) -> int:
        """One partial sum on its way back."""
        return self.hidden * self.input_dtype.itemsize


@dataclass(frozen=True)
class Workload:
    """The tokens of one rank among ``ranks``."""

    shape: Shape
    ranks: int
    rank: int
    tokens: int

    @property
    def local_experts(self) -> int:
        return self.shape.experts // self.ranks

    @cached_property
    def x(self) -> torch.Tensor:
        """Whole numbers from -8 to 7, which every format but fp8 holds exactly."""
        values = torch.randint(-8, 8, (self.tokens, self.shape.hidden), generator=self._generator(0))
        return values.to(self.shape.input_dtype)

    @cached_property
    def topk_idx(self) -> torch.Tensor:
        """Distinct experts per token, drawn evenly."""
        scores = torch.rand(self.tokens, self.shape.experts, generator=self._generator(1))
        return scores.topk(self.shape.topk, dim=1).indices.contiguous()

    @cached_property
    def hosts(self) -> torch.Tensor:
        """bool ``[tokens, ranks]``: which ranks a token goes to, once each."""
        hosts = torch.zeros(self.tokens, self.ranks, dtype=torch.bool)
        return hosts.scatter_(1, self.topk_idx // self.local_experts, True)

    @cached_property
    def rows_to(self) -> list[int]:
        """How many rows go to each rank, this one included."""
        return [int(rows) for rows in self.hosts.sum(dim=0)]

    @property
    def rows(self) -> int:
        return sum(self.rows_to)

    def of(self, rank: int) -> Workload:
        """What another rank sends in the same round."""
        return Workload(self.shape, self.ranks, rank, self.tokens)

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(2 * self.rank + stream)
