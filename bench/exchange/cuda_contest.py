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

from bench.exchange.contest_data import hosts_of, input_of, wanted_sums
from bench.exchange.cuda_rank import ROUNDS, Case, CudaExchangeRank
from bench.exchange.flashinfer.contender import FlashInferContender
from bench.exchange.nvshmem.put_contender import PutContender

WARM_UP = 2
"""Replays before the first block."""
_FP8_STEP = 2**-4
"""e4m3 keeps three bits after the leading one, so it may be wrong by half a step of them."""


class Contender(CudaExchangeRank):
    """A rank of one contender, with one graph."""

    def prepare(self) -> None:
        """By all ranks of the contender at once. AssertionError if it delivers anything else than what was sent."""
        self.x.copy_(input_of(self.case, self.buffer.rank))
        self.weights.fill_(1.0)
        with torch.cuda.stream(self.stream):
            self.tokens = self.buffer.dispatch(self.x, self.idx, self.weights)
            self._compare_rows()
            self.buffer.combine_input().fill_(self.buffer.rank + 1)
            self.buffer.combine(self.buffer.combine_input(), self.tokens, out=self.out)
        torch.cuda.synchronize()
        self.buffer.status().raise_if_bad()
        self._compare_sums()
        self.plain = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.plain, stream=self.stream):
            self.rounds(ROUNDS)

    def let_go(self) -> None:
        """Buffers may close in any order."""

    def close(self) -> None:
        self.buffer.close()

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
        if not torch.equal(self.out.float().cpu(), wanted_sums(self.case, self.buffer.rank)):
            raise AssertionError(f"rank {self.buffer.rank} got other sums than those of what the experts wrote")


def _kind_of(case: Case) -> type[Contender | FlashInferContender | PutContender]:
    if case.flashinfer:
        return FlashInferContender
    return PutContender if case.nvshmem else Contender


def measure_contest(
    owned: list[int], cases: Sequence[Case], place: str, blocks: int, replays: int
) -> list[list[float]]:
    """For each contender, how many us a round took in each replay of its blocks; of the rank that this process owns. To be
    called by all processes at once; one that has no rank among the contenders answers nothing."""
    rank = owned[0]
    if rank >= cases[0].ranks:
        return [[] for _ in cases]
    with contextlib.ExitStack() as closing:
        contenders: list[Contender | FlashInferContender | PutContender] = []
        for number, case in enumerate(cases):
            contender = _kind_of(case)(replace(case, stamped=False), rank, f"{place}-{number}")
            closing.callback(contender.close)
            contender.connect()
            contenders.append(contender)
        first = contenders[0]
        assert isinstance(first, Contender)
        pace = first.buffer
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
            pace.barrier()
            contender.finish()
            contender.let_go()
        pace.barrier()
        return seen
