"""Times dispatch and combine on one GPU that several ranks share, as replays of captured graphs.

Ranks are processes (under MPS their kernels really run together) or streams of one process. Each captures a graph of many
rounds. What a round costs, dispatch and combine together, is taken from graphs without any instrument in them; how it
splits, from a run in which one rank alone has events around its kernels: with events in every rank they, not the
kernels, would be measured.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

import eep
from eep.abi import native
from eep.experts.repair.peer_memory import copy_all

ROUNDS = 20  # per graph
STAMPED_BLOCKS = 32
SETTLE = 4  # first rounds of a graph, which pay for ranks that start apart
PATIENCE_S = 120


@dataclass(frozen=True)
class Case:
    ranks: int
    tokens: int
    hidden: int
    wire: str = "bf16"
    topk: int = 8
    experts: int = 256
    stamped: bool = False
    """Whether rank 0 notes when the blocks of its dispatches pass their stations, for :meth:`Fleet.stations`."""
    fixed: bool = False
    """Membership as launch parameters instead of the table in memory: what a build without elasticity does."""


def routing(case: Case, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(case.tokens, case.experts, generator=generator).topk(case.topk).indices


def exchanged_rows(case: Case) -> int:
    """Rows that one dispatch moves in all: a token goes once to each rank that hosts one of its experts."""
    local = case.experts // case.ranks
    ranks = torch.arange(case.ranks)
    return sum(int((routing(case, rank)[..., None] // local == ranks).any(1).sum()) for rank in range(case.ranks))


class Rank:
    """One rank with its graphs: plain, and with an event around each kernel."""

    def __init__(self, case: Case, rank: int, place: str) -> None:
        self.case = case
        self.buffer = eep.Buffer(
            rank,
            rendezvous=place,
            max_ranks=case.ranks,
            max_tokens=case.tokens,
            hidden=case.hidden,
            topk=case.topk,
            local_experts=case.experts // case.ranks,
            wire=case.wire,
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
        self.buffer.context.tune(0, asked)

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

    def stations_us(self) -> list[float]:
        """When the last block passed each station of the last dispatch, counted from the start of the first block."""
        blocks = [block for block in self.buffer.context.stamps(STAMPED_BLOCKS) if block.clock[0]]
        first = min(block.began_ns for block in blocks)
        # The shared timer is coarse; over all blocks together it still tells how fast the clocks tick.
        ticks = sum(block.clock[-1] - block.clock[0] for block in blocks)
        us_per_tick = sum(block.ended_ns - block.began_ns for block in blocks) / 1e3 / ticks
        return [
            max(
                (block.began_ns - first) / 1e3 + (block.clock[station] - block.clock[0]) * us_per_tick
                for block in blocks
                if block.clock[station]
            )
            for station in range(len(native.BlockStamps.STATIONS))
        ]

    def split_us(self) -> list[tuple[float, float]]:
        marks = self.marks
        return [
            (marks[2 * i].elapsed_time(marks[2 * i + 1]) * 1e3, marks[2 * i + 1].elapsed_time(marks[2 * i + 2]) * 1e3)
            for i in range(SETTLE, ROUNDS)
        ]


def measure_ranks(case: Case, place: str, replays: int, owned: list[int]) -> dict[str, list[Any]]:
    """What this process's share of the ranks sees: all of them (streams) or one (a process per rank)."""
    owned = [rank for rank in owned if rank < case.ranks]
    with contextlib.ExitStack() as closing:
        ranks = [Rank(case, rank, place) for rank in owned]
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


def patch_table(case: Case, place: str, owned: list[int]) -> float:
    """How many us it takes to go on without the last rank, from the moment that this one knows of its loss."""
    rank = Rank(case, owned[0], place)
    with contextlib.closing(rank.buffer):
        rank.connect()
        rank.buffer.barrier()
        if owned[0] == case.ranks - 1:
            return 0.0  # the one that is lost
        began = time.perf_counter()
        rank.buffer.disconnect_ranks([case.ranks - 1])
        took = (time.perf_counter() - began) * 1e6
        rank.warm_up()
        torch.cuda.synchronize()
        return took


_OF_OWNED = ("measure_ranks", "patch_table")


def _serve(connection: Connection, owned: list[int]) -> None:
    while (message := connection.recv()) is not None:
        call, *arguments = message
        try:
            connection.send(globals()[call](*arguments, owned) if call in _OF_OWNED else globals()[call](*arguments))
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


class Fleet:
    """Processes that own ranks, one each or one for all, and measure one case after another."""

    def __init__(self, kind: str, ranks: int) -> None:
        self.kind = kind
        context = mp.get_context("spawn")
        self._processes = []
        for owned in [list(range(ranks))] if kind == "streams" else [[rank] for rank in range(ranks)]:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, owned), daemon=True)
            process.start()
            self._processes.append((process, ours))

    def ask_one(self, call: str, *arguments: Any) -> Any:
        """A measurement that one process makes alone."""
        return self._ask(1, call, *arguments)[0]

    def stations(self, case: Case, replays: int) -> dict[str, float]:
        """Where a dispatch of rank 0 spends its time: medians, in us, by station."""
        seen = self._measure(replace(case, stamped=True), replays)[0]["stations"]
        medians = [statistics.median(times) for times in zip(*seen, strict=True)]
        return dict(zip(native.BlockStamps.STATIONS, medians, strict=True))

    def patch_us(self, case: Case, times: int = 5) -> float:
        """How long the slowest survivor of a loss takes to patch its table: the median of some losses."""
        slowest = []
        for _ in range(times):
            with eep.Rendezvous.temporary() as rendezvous:
                slowest.append(max(self._ask(case.ranks, "patch_table", case, str(rendezvous.path))))
        return statistics.median(slowest)

    def _measure(self, case: Case, replays: int) -> list[Any]:
        with eep.Rendezvous.temporary() as rendezvous:
            count = 1 if self.kind == "streams" else case.ranks
            return self._ask(count, "measure_ranks", case, str(rendezvous.path), replays)

    def measure(self, case: Case, replays: int) -> dict[str, Any]:
        answers = self._measure(case, replays)
        rounds = [max(times) for times in zip(*(answer["round"] for answer in answers), strict=True)]
        return summarize(case, self.kind, rounds, answers[0]["split"])

    def close(self) -> None:
        for process, connection in self._processes:
            connection.send(None)
            process.join(30)
            process.kill()

    def _ask(self, count: int, *message: Any) -> list[Any]:
        chosen = [connection for _, connection in self._processes[:count]]
        for connection in chosen:
            connection.send(message)
        answers = []
        for connection in chosen:
            if not connection.poll(PATIENCE_S):
                raise RuntimeError(f"a rank hangs in {message}")
            answers.append(connection.recv())
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(f"{message}: {answer}")
        return answers


@contextlib.contextmanager
def ranks_as(kind: str, ranks: int) -> Iterator[Fleet]:
    if kind == "streams":
        # Streams of one process share hardware queues unless there are enough of them; kernels that wait need their own.
        # And no kernel may have to be loaded while another waits.
        os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    fleet = Fleet(kind, ranks)
    try:
        yield fleet
    finally:
        fleet.close()
        for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"):
            os.environ.pop(variable, None)


def summarize(case: Case, ranks_are: str, rounds: list[float], split: list[tuple[float, float]]) -> dict[str, Any]:
    def at(values: list[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(len(values) * share))]

    dispatch, combine = [pair[0] for pair in split], [pair[1] for pair in split]
    return {
        **asdict(case),
        "ranks_are": ranks_are,
        "round_us": statistics.median(rounds),
        "round_p99_us": at(rounds, 0.99),
        "dispatch_us": statistics.median(dispatch),
        "dispatch_p99_us": at(dispatch, 0.99),
        "combine_us": statistics.median(combine),
        "combine_p99_us": at(combine, 0.99),
    }


def batched_copy_rate() -> float:
    """The same for expert weights: 96 experts of three tensors each, from one place to another in one batch."""
    sizes = [7168 * 2048, 7168 * 2048, 2048 * 7168] * 96  # bytes; fp8
    source, target = (torch.empty(sum(sizes), dtype=torch.uint8, device="cuda") for _ in range(2))
    targets, sources = target.split(sizes), source.split(sizes)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(10):
        torch.cuda._sleep(10_000_000)  # some ms, in which the host makes its list of copies
        begin.record()
        copy_all(targets, sources)
        end.record()
        end.synchronize()
        rates.append(2 * source.numel() / (begin.elapsed_time(end) * 1e3))
    return statistics.median(rates)


def torch_round_us(case: Case) -> float:
    """The same exchange by torch operators in one stream: gather rows per rank, add them back up."""
    local = case.experts // case.ranks
    x = torch.randn(case.ranks * case.tokens, case.hidden, device="cuda").to(torch.bfloat16)
    wanted = torch.cat([routing(case, rank) for rank in range(case.ranks)]).cuda() // local
    rows = torch.cat([(wanted == rank).any(1).nonzero()[:, 0] for rank in range(case.ranks)])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    out = torch.zeros(x.shape, device="cuda")

    def exchange() -> None:
        out.zero_().index_add_(0, rows, x[rows].float())

    with torch.cuda.stream(stream):
        exchange()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        exchange()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(20):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)
