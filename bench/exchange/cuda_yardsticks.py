"""What the GPU benchmark is compared with: a batched copy of expert weights, and the exchange by torch operators."""

from __future__ import annotations

import statistics

import torch

from bench.exchange.cuda_rank import Case, routing
from eep.experts.repair.peer_memory import copy_all


def batched_copy_rate() -> float:
    """Bytes per microsecond that one batch moves, read and written: 96 experts of three tensors each."""
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
