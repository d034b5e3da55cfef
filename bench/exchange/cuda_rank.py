"""Ranks that share one GPU and replay captured graphs of dispatch and combine.

A rank is a process (under MPS the kernels of all ranks really run together) or a stream of one process. It captures a graph
of many rounds. The cost of a round, dispatch and combine together, comes from graphs without any instrument in them. How it
splits comes from a run in which rank 0 alone has events around its kernels: with events in every rank the benchmark would
measure the events, not the kernels.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import torch

import eep
from eep.abi import native

ROUNDS = 20  # per graph
SETTLE = 4  # first rounds of a graph, which pay for ranks that start apart


@dataclass(frozen=True)
class Case:
    """What a measurement exchanges, and between how many ranks."""

    ranks: int
    tokens: int
    hidden: int
    wire: str = "bf16"
    topk: int = 8
    experts: int = 256
    stamped: bool = False
    """Whether rank 0 notes when the blocks of its kernels pass each station, for :meth:`CudaFleet.stations`."""
    layout: str = "rank"
    combine: str | None = None
    fixed: bool = False
    """Membership as launch parameters instead of the table in memory, as in a build without elasticity."""
    unchecked: bool = False
    """Nobody looks whether an outbox changed while it was read."""
    unclosed: bool = False
    """A dispatch does not say that the outbox is of another round."""
    overlaps: bool = False
    """Whether kernels begin while the one before them ends."""
    wide: bool = False
    """Whether blocks have many threads for few tokens, too."""
    at_once: bool = False
    """Whether of few tokens the next kernel begins before peers are waited for; kernels that overlap, and of ours only."""
    unfenced: bool = False
    """A combine sends its flags without a fence before them."""
    blocks: int = 0
    """Of a kernel; 0: as many as the library thinks best."""
    capacity: int = 0
    """For how many tokens the buffer has room; 0: for those of the case."""
    shares_gpu: bool = False
    """Whether kernels that wait leave room for the work of other ranks."""
    flashinfer: str = ""
    """The library of FlashInfer's kernels, if it is they that are measured."""
    threads: int = 256
    """Of a block of FlashInfer's."""
    nvshmem: str = ""
    """The library of the exchange through NVSHMEM, if it is that which is measured."""
    way: str = "puts"
    """In which rows travel through NVSHMEM."""


def routing(case: Case, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(case.tokens, case.experts, generator=generator).topk(case.topk).indices


def exchanged_rows(case: Case) -> int:
    """Rows that one dispatch moves in all: a token goes once to each rank that hosts one of its experts."""
    local = case.experts // case.ranks
    ranks = torch.arange(case.ranks)
    return sum(int((routing(case, rank)[..., None] // local == ranks).any(1).sum()) for rank in range(case.ranks))


class CudaExchangeRank:
    """One rank with its graphs: plain, and with an event around each kernel."""

    def __init__(self, case: Case, rank: int, place: str) -> None:
        self.case = case
        self.buffer = eep.Buffer(
            rank,
            rendezvous=place,
            max_ranks=case.ranks,
            max_tokens=case.capacity or case.tokens,
            shares_gpu=case.shares_gpu,
            overlaps=case.overlaps,
            hidden=case.hidden,
            topk=case.topk,
            local_experts=case.experts // case.ranks,
            wire=case.wire,
            combine=case.combine,
            layout=case.layout,
            device="cuda",
            timeout_ms=20_000,
        )
        self.stream = torch.cuda.Stream()
        self.x = torch.randn(case.tokens, case.hidden, device="cuda").to(torch.bfloat16)
        self.idx = routing(case, rank).cuda()
        self.weights = torch.rand(case.tokens, case.topk, device="cuda")
        self.out = torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, device="cuda")
        self.buffer.combine_input().zero_()
        self.around = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.marks = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2 * ROUNDS + 1)]

    def connect(self) -> None:
        self.buffer.connect_ranks(range(self.case.ranks))
        stamped = self.case.stamped and self.buffer.rank == 0
        asked = native.BENCH_FIXED_MEMBERSHIP * self.case.fixed + native.BENCH_STAMPS * stamped
        asked |= native.BENCH_WIDE * self.case.wide | native.BENCH_AT_ONCE * self.case.at_once
        asked |= native.BENCH_UNCHECKED * self.case.unchecked | native.BENCH_UNCLOSED * self.case.unclosed
        asked |= native.BENCH_UNFENCED * self.case.unfenced
        self.buffer.context.tune(self.case.blocks, asked)

    def rounds(self, count: int, marks: list[torch.cuda.Event] | None = None) -> None:
        for number in range(count):
            if marks:
                marks[2 * number].record()
            tokens = self.buffer.dispatch(self.x, self.idx, self.weights)
            if marks:
                marks[2 * number + 1].record()
            self.buffer.combine(self.buffer.combine_input(), tokens, out=self.out)
        if marks:
            marks[-1].record()

    def warm_up(self) -> None:
        with torch.cuda.stream(self.stream):
            self.rounds(2)

    def capture(self) -> None:
        self.plain, self.marked = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.plain, stream=self.stream):
            self.rounds(ROUNDS)
        with torch.cuda.graph(self.marked, stream=self.stream):
            self.rounds(ROUNDS, self.marks)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(self.stream):
            self.around[0].record()
            graph.replay()
            self.around[1].record()

    def round_us(self) -> float:
        return self.around[0].elapsed_time(self.around[1]) * 1e3 / ROUNDS

    def stations_us(self) -> list[tuple[float, float]]:
        """When the first and the last block passed each station of the last dispatch, and then those of the last combine,
        counted from the start of the first block."""
        stamps = self.buffer.context.stamps(2 * native.STAMPED_BLOCKS)
        kernels = [stamps[: native.STAMPED_BLOCKS], stamps[native.STAMPED_BLOCKS :]]
        kernels = [[block for block in blocks if block.clock[0]] for blocks in kernels]
        first = min(block.began_ns for block in kernels[0])
        # The shared timer is coarse; over all blocks together it still tells how fast the clocks tick.
        every = kernels[0] + kernels[1]
        ticks = sum(block.clock[-1] - block.clock[0] for block in every)
        us_per_tick = sum(block.ended_ns - block.began_ns for block in every) / 1e3 / ticks
        passed = []
        for blocks in kernels:
            for station in range(len(native.BlockStamps.STATIONS)):
                times = [
                    (block.began_ns - first) / 1e3 + (block.clock[station] - block.clock[0]) * us_per_tick
                    for block in blocks
                    if block.clock[station]
                ]
                passed.append((min(times), max(times)))
        return passed

    def split_us(self) -> list[tuple[float, float]]:
        marks = self.marks
        return [
            (marks[2 * i].elapsed_time(marks[2 * i + 1]) * 1e3, marks[2 * i + 1].elapsed_time(marks[2 * i + 2]) * 1e3)
            for i in range(SETTLE, ROUNDS)
        ]


def measure_ranks(owned: list[int], case: Case, place: str, replays: int) -> dict[str, list[Any]]:
    """Measures the ranks that this process owns: all of them (streams) or one (a process per rank)."""
    owned = [rank for rank in owned if rank < case.ranks]
    with contextlib.ExitStack() as closing:
        ranks = [CudaExchangeRank(case, rank, place) for rank in owned]
        for rank in ranks:
            closing.callback(rank.buffer.close)
        for rank in ranks:
            rank.connect()
        alone = len(owned) < case.ranks
        if alone:
            ranks[0].buffer.barrier()
        for rank in ranks:
            rank.warm_up()
        torch.cuda.synchronize()
        for rank in ranks:
            rank.capture()
        seen: dict[str, list[Any]] = {"round": [], "split": [], "stations": []}
        for kind in ("round", "split"):
            for replay in range(replays + 3):
                if alone:
                    ranks[0].buffer.barrier()
                for number, rank in zip(owned, ranks, strict=True):
                    rank.replay(rank.marked if kind == "split" and number == 0 else rank.plain)
                torch.cuda.synchronize()
                if replay < 3:
                    continue
                if kind == "round":
                    seen["round"].append(max(rank.round_us() for rank in ranks))
                    if case.stamped and 0 in owned:
                        seen["stations"].append(ranks[owned.index(0)].stations_us())
                elif 0 in owned:
                    seen["split"] += ranks[owned.index(0)].split_us()
        for rank in ranks:
            rank.buffer.status().raise_if_bad()
        if alone:
            ranks[0].buffer.barrier()
        return seen


def patch_table(owned: list[int], case: Case, place: str) -> float:
    """How many us this rank takes to go on without the last one, from the moment it knows of the loss."""
    rank = CudaExchangeRank(case, owned[0], place)
    with contextlib.closing(rank.buffer):
        rank.connect()
        rank.buffer.barrier()
        if owned[0] == case.ranks - 1:
            return 0.0  # this is the lost rank
        began = time.perf_counter()
        rank.buffer.disconnect_ranks([case.ranks - 1])
        took = (time.perf_counter() - began) * 1e6
        rank.warm_up()
        torch.cuda.synchronize()
        return took
