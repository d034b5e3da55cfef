"""Times dispatch and combine on a GPU, each rank a process (under MPS) that replays one captured graph.

A rank's graph holds several rounds with an event around each kernel. All ranks replay it together; a round's time is that
of the slowest rank. Used by ``dispatch_combine.py --device cuda``.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

ROUNDS_PER_GRAPH = 10


@dataclass(frozen=True)
class Case:
    ranks: int
    tokens: int
    hidden: int
    wire: str = "bf16"
    topk: int = 8
    experts: int = 256
    blocks: int = 0
    """Thread blocks per rank; 0 for the default, the GPU's multiprocessors divided by the ranks."""
    fixed: bool = False
    """Membership as launch parameters instead of the table in memory: what a build without elasticity does."""


def exchanged_rows(case: Case) -> int:
    """Rows that one dispatch moves in all, from the routing that the ranks draw."""
    import torch

    return sum(
        int(
            (_routing(case, rank).unsqueeze(-1) // (case.experts // case.ranks) == torch.arange(case.ranks))
            .any(1)
            .sum()
        )
        for rank in range(case.ranks)
    )


def _routing(case: Case, rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(rank)
    return torch.rand(case.tokens, case.experts, generator=generator).topk(case.topk).indices


def _measure(case: Case, rank: int, place: str, replays: int) -> dict[str, list[float]]:
    import torch

    import eep
    from eep import native

    # Each rank's buffer serves one case: the next one is a new instance in a directory of its own.
    with eep.Buffer(
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
    ) as buffer:
        buffer.connect_ranks(range(case.ranks))
        if case.blocks or case.fixed:
            blocks = case.blocks or torch.cuda.get_device_properties(0).multi_processor_count // case.ranks
            native.check(buffer._library, buffer._library.eep_tune(buffer._context, min(blocks, 32), int(case.fixed)))
        x = torch.randn(case.tokens, case.hidden, device="cuda").to(torch.bfloat16)
        idx, weights = _routing(case, rank).cuda(), torch.rand(case.tokens, case.topk, device="cuda")
        out = torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, device="cuda")
        buffer.combine_input().zero_()
        marks = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2 * ROUNDS_PER_GRAPH + 1)]

        def rounds() -> None:
            for number in range(ROUNDS_PER_GRAPH):
                marks[2 * number].record()
                tokens = buffer.dispatch(x, idx, weights)
                marks[2 * number + 1].record()
                buffer.combine(buffer.combine_input(), tokens, out=out)
            marks[-1].record()

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            buffer.barrier()
            tokens = buffer.dispatch(x, idx, weights)
            buffer.combine(buffer.combine_input(), tokens, out=out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            rounds()
        times: dict[str, list[float]] = {"dispatch": [], "combine": []}
        for replay in range(replays + 3):
            buffer.barrier()
            graph.replay()
            torch.cuda.synchronize()
            if replay < 3:
                continue
            for number in range(1, ROUNDS_PER_GRAPH):  # the first round pays for ranks that start apart
                times["dispatch"].append(marks[2 * number].elapsed_time(marks[2 * number + 1]) * 1e3)
                times["combine"].append(marks[2 * number + 1].elapsed_time(marks[2 * number + 2]) * 1e3)
        status = buffer.status()
        status.raise_if_bad()
        buffer.barrier()
        return times


def copy_rate() -> float:
    """Bytes per microsecond that a large copy on the device moves, read and written."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(10):
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(2 * source.numel() / (begin.elapsed_time(end) * 1e3))
    return statistics.median(rates)


def _rank_main(connection: Connection, rank: int) -> None:
    while (message := connection.recv()) is not None:
        case, place, replays = message
        try:
            connection.send(copy_rate() if case is None else _measure(case, rank, place, replays))
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


class RankPool:
    """Processes that measure one case after another."""

    def __init__(self, ranks: int) -> None:
        context = mp.get_context("spawn")
        self._ranks = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(theirs, rank), daemon=True)
            process.start()
            self._ranks.append((process, ours))

    def copy_rate(self) -> float:
        self._ranks[0][1].send((None, "", 0))
        rate = self._ranks[0][1].recv()
        if isinstance(rate, str):
            raise RuntimeError(rate)
        return float(rate)

    def measure(self, case: Case, replays: int) -> dict[str, Any]:
        """Median and 99th percentile over rounds of the slowest rank, in microseconds."""
        import eep

        with eep.Rendezvous.temporary() as rendezvous:
            chosen = self._ranks[: case.ranks]
            for _, connection in chosen:
                connection.send((case, str(rendezvous.path), replays))
            answers = []
            for _, connection in chosen:
                if not connection.poll(120):
                    raise RuntimeError(f"a rank hangs in {case}")
                answers.append(connection.recv())
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(f"{case}: {answer}")
        result: dict[str, Any] = asdict(case)
        for kind in ("dispatch", "combine"):
            slowest = sorted(max(times) for times in zip(*(answer[kind] for answer in answers), strict=True))
            result[f"{kind}_us"] = statistics.median(slowest)
            result[f"{kind}_p99_us"] = slowest[int(len(slowest) * 0.99)]
            result[f"{kind}_mean_rank_us"] = statistics.median(
                statistics.fmean(times) for times in zip(*(answer[kind] for answer in answers), strict=True)
            )
        return result

    def close(self) -> None:
        for process, connection in self._ranks:
            connection.send(None)
            process.join(30)
            process.kill()


if __name__ == "__main__":
    import sys

    pool = RankPool(8)
    rate = pool.copy_rate()
    print(f"copy rate {rate / 1e3:.0f} GB/s", flush=True)
    for case in [
        Case(8, 128, 7168),
        Case(8, 128, 7168, fixed=True),
        Case(8, 128, 7168, wire="fp8"),
        Case(4, 128, 7168),
        Case(2, 128, 7168),
        Case(8, 1, 7168),
        Case(8, 128, 2048),
    ]:
        rows = exchanged_rows(case)
        floor = (rows + case.ranks * case.tokens) * case.hidden * 2 / rate
        try:
            r = pool.measure(case, int(sys.argv[1]) if len(sys.argv) > 1 else 30)
        except RuntimeError as error:
            print(error, flush=True)
            break
        print(
            f"{case}: dispatch {r['dispatch_us']:.1f} (p99 {r['dispatch_p99_us']:.1f}, mean {r['dispatch_mean_rank_us']:.1f}) "
            f"combine {r['combine_us']:.1f} (p99 {r['combine_p99_us']:.1f}, mean {r['combine_mean_rank_us']:.1f}) floor {floor:.1f}",
            flush=True,
        )
    pool.close()
