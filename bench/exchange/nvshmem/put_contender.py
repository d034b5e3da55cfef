"""The exchange through NVSHMEM as a contender: what a round costs where membership is fixed, and no peer may die.

It exchanges what EEP does in its layout by rank: each row goes once to each rank that hosts one of its experts, with the
routing beside it; combine adds up one partial sum of each of these ranks, in the order of the ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.exchange.contest_data import hosts_of, input_of, wanted_sums
from bench.exchange.cuda_rank import ROUNDS, Case, routing
from bench.exchange.nvshmem.pes import symmetric_memory
from bench.exchange.nvshmem.put_library import WAYS, PutExchange, load_puts

_LINE = 128


@dataclass(frozen=True)
class PutPlaces:
    """What lies where in a workspace, which has the same layout at all ranks."""

    heard: int
    answered: int
    round: int
    experts_of_rows: int
    weights_of_rows: int
    rows: int
    outputs: int
    returned: int
    end: int

    @classmethod
    def of(cls, case: Case) -> PutPlaces:
        choices = case.ranks * case.tokens * case.topk
        rows = case.ranks * case.tokens * case.hidden * 2
        returned = 0 if case.way == "stores" else rows
        offsets = [0]
        for size in (8 * case.ranks, 8 * case.ranks, 8, 4 * choices, 4 * choices, rows, rows, returned):
            offsets.append(-(-(offsets[-1] + size) // _LINE) * _LINE)
        return cls(*offsets)


def heap_bytes_of(cases: Sequence[Case]) -> int:
    """For cases that take turns."""
    return sum(PutPlaces.of(case).end for case in cases)


class PutContender:
    """A rank of it, with one graph."""

    def __init__(self, case: Case, rank: int, place: str) -> None:
        self.case, self.rank = case, rank
        self._library = load_puts(case.nvshmem)
        self._at = PutPlaces.of(case)
        self._heap = symmetric_memory()
        self._own = self._heap.take(self._at.end)
        _check(self._library.clear_words(self._own, self._at.experts_of_rows), "clearing the words of a workspace")
        blocks = ctypes.c_int()
        _check(self._library.blocks_of_a_pe(case.ranks, blocks), "loading the kernels")
        self.stream = torch.cuda.Stream()
        self._x = input_of(case, rank).cuda()
        self._experts = routing(case, rank).int().cuda()
        self._weights = torch.ones(case.tokens, case.topk, device="cuda")
        self._out = torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, device="cuda")
        self._exchange = PutExchange(
            ranks=case.ranks,
            rank=rank,
            experts=case.experts,
            topk=case.topk,
            tokens=case.tokens,
            hidden=case.hidden,
            blocks=min(blocks.value, case.ranks * case.tokens),
            way=WAYS.index(case.way),
            heard=self._own + self._at.heard,
            answered=self._own + self._at.answered,
            round=self._own + self._at.round,
            experts_of_rows=self._own + self._at.experts_of_rows,
            weights_of_rows=self._own + self._at.weights_of_rows,
            rows=self._own + self._at.rows,
            outputs=self._own + self._at.outputs,
            returned=self._own + self._at.returned,
            x=self._x.data_ptr(),
            experts_of_tokens=self._experts.data_ptr(),
            weights=self._weights.data_ptr(),
            out=self._out.data_ptr(),
        )
        self.plain = torch.cuda.CUDAGraph()
        self._around = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def connect(self) -> None:
        """The ranks have been connected since they started as PEs."""

    def prepare(self) -> None:
        """By all ranks at once. AssertionError if it delivers anything else than what was sent."""
        self._deliver()
        with torch.cuda.graph(self.plain, stream=self.stream):
            for _ in range(ROUNDS):
                self._dispatch()
                self._combine()

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(self.stream):
            self._around[0].record()
            graph.replay()
            self._around[1].record()

    def round_us(self) -> float:
        return self._around[0].elapsed_time(self._around[1]) * 1e3 / ROUNDS

    def finish(self) -> None:
        """What the last replay delivered is compared first."""
        torch.cuda.synchronize()
        self._compare_sums()
        self._deliver()

    def let_go(self) -> None:
        """The memory is that of the PEs."""
        torch.cuda.synchronize()

    def close(self) -> None:
        self.plain.reset()
        self._heap.give_back(self._at.end)

    def _deliver(self) -> None:
        case = self.case
        with torch.cuda.stream(self.stream):
            self._dispatch()
            torch.cuda.synchronize()
            self._compare_rows()
            outputs = torch.full((case.ranks * case.tokens, case.hidden), self.rank + 1.0, dtype=torch.bfloat16)
            self._copy(self._own + self._at.outputs, outputs.data_ptr(), outputs.nbytes)
            self._out.fill_(0)
            self._combine()
        torch.cuda.synchronize()
        self._compare_sums()

    def _compare_rows(self) -> None:
        case = self.case
        rows = torch.empty(case.ranks, case.tokens, case.hidden, dtype=torch.bfloat16)
        experts = torch.empty(case.ranks, case.tokens, case.topk, dtype=torch.int32)
        self._copy(rows.data_ptr(), self._own + self._at.rows, rows.nbytes)
        self._copy(experts.data_ptr(), self._own + self._at.experts_of_rows, experts.nbytes)
        for source in range(case.ranks):
            sent = hosts_of(case, source)[:, self.rank]
            same = torch.equal(rows[source][sent], input_of(case, source)[sent])
            if not same or not torch.equal(experts[source], routing(case, source).int()):
                raise AssertionError(
                    f"rank {self.rank} received something else than rank {source} sent with NVSHMEM ({case.way})"
                )

    def _compare_sums(self) -> None:
        if not torch.equal(self._out.float().cpu(), wanted_sums(self.case, self.rank)):
            raise AssertionError(
                f"rank {self.rank} got other sums from NVSHMEM ({self.case.way}) than those of what the experts wrote"
            )

    def _dispatch(self) -> None:
        _check(self._library.put_rows(self._exchange, torch.cuda.current_stream().cuda_stream), "dispatch")

    def _combine(self) -> None:
        _check(self._library.return_rows(self._exchange, torch.cuda.current_stream().cuda_stream), "combine")

    def _copy(self, to: int, source: int, size: int) -> None:
        _check(self._library.copy_words(to, source, size), "copying")


def _check(code: int, what: str) -> None:
    if code:
        raise AssertionError(f"NVSHMEM: {what}: CUDA error {code}")
