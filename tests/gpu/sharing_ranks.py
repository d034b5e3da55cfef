"""Rank processes of which one has matrix products to do while the others wait for it."""

from __future__ import annotations

from typing import Any

import torch

import eep
from tests.rank_program import RankProgram


class BusyProgram(RankProgram):
    """Before each step rank 0 multiplies matrices of sizes that libraries start in clusters of multiprocessors."""

    BUSY = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._last: dict[int, int] = {}
        """By rank, its signal of the last step."""

    def multiply(self) -> None:
        for inner, outer in ((2048, 3072), (2048, 2048), (2048, 32)):
            rows = torch.ones(128, inner, dtype=torch.bfloat16, device="cuda")
            torch.nn.functional.linear(rows, torch.ones(outer, inner, dtype=torch.bfloat16, device="cuda"))

    def warm_up(self) -> None:
        super().warm_up()
        self.multiply()
        torch.cuda.synchronize()

    def step(self, seed: int, active: tuple[int, ...], count: int = 1) -> tuple[list[torch.Tensor], eep.Status]:
        if self.buffer.rank != self.BUSY:
            return super().step(seed, active, count)
        others = [rank for rank in active if rank != self.BUSY]
        self.wait_for_signals({rank: self._last.get(rank, 0) for rank in others})
        self.multiply()
        result = super().step(seed, active, count)
        self._last = self.signals_of(others)
        return result
