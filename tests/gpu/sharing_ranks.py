"""Rank processes of which one has matrix products to do while the others wait for it."""

from __future__ import annotations

import time

import torch

import eep
from tests.rank_program import RankProgram


class BusyProgram(RankProgram):
    """Before each step rank 0 multiplies matrices of sizes that libraries start in clusters of multiprocessors."""

    BUSY = 0
    WAIT_S = 0.05
    """By then the others wait in their kernels."""

    def multiply(self) -> None:
        for inner, outer in ((2048, 3072), (2048, 2048), (2048, 32)):
            rows = torch.ones(128, inner, dtype=torch.bfloat16, device="cuda")
            torch.nn.functional.linear(rows, torch.ones(outer, inner, dtype=torch.bfloat16, device="cuda"))

    def warm_up(self) -> None:
        super().warm_up()
        self.multiply()
        torch.cuda.synchronize()

    def step(self, seed: int, active: tuple[int, ...], count: int = 1) -> tuple[list[torch.Tensor], eep.Status]:
        if self.buffer.rank == self.BUSY:
            time.sleep(self.WAIT_S)
            self.multiply()
        return super().step(seed, active, count)
