"""Contenders that take turns: in the same processes, on the same routing and data, a block of rounds of one and then of the
next, so that whatever else changes on the GPU changes for all of them.

Before anything is timed, each has to deliver: every row that arrives is compared with what its source sent, and every sum
with what the experts wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.exchange.cuda_rank import ROUNDS, Case, CudaExchangeRank, routing

WARM_UP = 2
"""Replays before the first block."""
_FP8_STEP = 2**-4
"""e4m3 keeps three bits after the leading one, so it may be wrong by half a step of them."""


def input_of(case: Case, rank: int) -> torch.Tensor:
    """Whole numbers from -8 to 7, which bf16 holds exactly; every rank can tell those of the others."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(-8, 8, (case.tokens, case.hidden), generator=generator).to(torch.bfloat16)


def hosts_of(case: Case, rank: int) -> torch.Tensor:
    """bool ``[tokens, ranks]``: which ranks a token goes to."""
    ranks = torch.arange(case.ranks)
    return (routing(case, rank)[..., None] // (case.experts // case.ranks) == ranks).any(1)


class Contender(CudaExchangeRank):
    """A rank of one contender, with one graph."""

    def prepare(self) -> None:
        """By all ranks of the contender at once. AssertionError if it delivers anything else than what was sent."""
        self.x.copy_(input_of(self.case, self.buffer.rank))
        self.weights.fill_(1.0)
        with torch.cuda.stream(self.stream):
            self.tokens = self.buffer.dispatch(self.x, self.idx, self.weights)
            self._compare_rows()
            # Each rank answers with its number plus one, so that a sum shows which ranks took part in it.
            self.buffer.combine_input().fill_(self.buffer.rank + 1)
            self.buffer.combine(self.buffer.combine_input(), self.tokens, out=self.out)
        torch.cuda.synchronize()
        self.buffer.status().raise_if_bad()
        self._compare_sums()
        self.plain = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.plain, stream=self.stream):
            self.rounds(ROUNDS)

    def finish(self) -> None:
        torch.cuda.synchronize()
        self.buffer.status().raise_if_bad()
        self._compare_sums()

    def _compare_rows(self) -> None:
        if self.case.layout != "rank":
            return  # its rows are those of this layout, packed: tests compare them
        torch.cuda.synchronize()
        for source in range(self.case.ranks):
            begin = source * self.buffer.max_tokens
            received = self.tokens.x[begin : begin + self.case.tokens].float()
            if self.tokens.scales is not None:
                scales = self.tokens.scales[begin : begin + self.case.tokens].float()
                received = received * scales.repeat_interleave(128, 1)
            sent = hosts_of(self.case, source)[:, self.buffer.rank].cuda()
            expected = input_of(self.case, source).cuda().float()
            tolerance = _FP8_STEP if self.case.wire.startswith("fp8") else 0.0
            if not torch.allclose(received[sent], expected[sent], rtol=tolerance, atol=0.0):
                raise AssertionError(f"rank {self.buffer.rank} received something else than rank {source} sent")

    def _compare_sums(self) -> None:
        case, rank = self.case, self.buffer.rank
        if case.layout == "rank":
            wanted = hosts_of(case, rank).float() @ torch.arange(1, case.ranks + 1, dtype=torch.float32)
        else:
            wanted = (routing(case, rank) // (case.experts // case.ranks) + 1).sum(1).float()
        if not torch.equal(self.out.float().cpu(), wanted[:, None].expand(-1, case.hidden)):
            raise AssertionError(f"rank {rank} got other sums than those of what the experts wrote")


def measure_contest(
    owned: list[int], cases: Sequence[Case], place: str, blocks: int, replays: int
) -> list[list[float]]:
    """For each contender, how many us a round took in each replay of its blocks; of the rank that this process owns. To be
    called by all processes at once; one that has no rank among the contenders answers nothing."""
    rank = owned[0]
    if rank >= cases[0].ranks:
        return [[] for _ in cases]
    with contextlib.ExitStack() as closing:
        contenders = []
        for number, case in enumerate(cases):
            contender = Contender(replace(case, stamped=False), rank, f"{place}-{number}")
            closing.callback(contender.buffer.close)
            contender.connect()
            contenders.append(contender)
        pace = contenders[0].buffer
        for contender in contenders:
            pace.barrier()
            contender.prepare()
        seen: list[list[float]] = [[] for _ in cases]
        for block in range(blocks + 1):
            for turn in range(len(contenders)):
                number = (turn + block) % len(contenders)
                for replay in range(WARM_UP + replays):
                    pace.barrier()
                    torch.cuda.synchronize()
                    contenders[number].replay(contenders[number].plain)
                    torch.cuda.synchronize()
                    if block and replay >= WARM_UP:
                        seen[number].append(contenders[number].round_us())
        for contender in contenders:
            contender.finish()
        pace.barrier()
        return seen
