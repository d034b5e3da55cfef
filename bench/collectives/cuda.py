"""Collectives of the backend eep on CUDA tensors, several ranks on one GPU, as replays of captured graphs.

NCCL refuses two ranks on one GPU, so there is nobody to compare with: beside each time stands the *byte floor*, which is
how long the device would take to copy the bytes that the collective must at least read and write, all ranks together.
The size is that of the larger tensor that a rank gives or gets, and at least one value for each rank. Run it under an
MPS daemon (tests/gpu/with_mps.sh), or the ranks take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import signal
import statistics
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import eep
from bench.collectives.rank import COLLECTIVES, ELEMENT, GroupSeat, _all_gather, _reduce_scatter
from bench.collectives.report import size_text
from bench.common.copy_rate import copy_rate
from bench.common.fleet import FleetError, started
from bench.common.provenance import provenance

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"
CALLS = 20  # per graph
SIZES = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20]
HEADER = f"{'collective':<14} {'ranks':>5} {'size':>8} | {'median us':>9} {'p99 us':>8} | {'floor us':>8} | time/floor"


def run_rank(seat: GroupSeat, pipe: Connection) -> None:
    """The life of a rank process; see :mod:`bench.common.fleet`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        rank = CudaRank(seat)
        pipe.send(("ok", None))
        while True:
            request, *arguments = pipe.recv()
            pipe.send(("ok", getattr(rank, request)(*arguments)))
    except EOFError:
        dist.destroy_process_group()
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send(("error", traceback.format_exc()))


class CudaRank:
    """A rank of the group, and the graph of the current case."""

    def __init__(self, seat: GroupSeat) -> None:
        torch.set_num_threads(1)
        self._seat = seat
        store = dist.FileStore(os.path.join(seat.rendezvous, "store"), seat.ranks)
        options = eep.pg.Options(rendezvous=seat.rendezvous, devices=("cpu", "cuda"))
        patience = datetime.timedelta(seconds=60)
        dist.init_process_group(
            "eep", store=store, rank=seat.rank, world_size=seat.ranks, timeout=patience, pg_options=options
        )
        self._stream = torch.cuda.Stream()
        self._around = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def meet(self) -> None:
        """Waits for the other ranks, on the CPU."""
        dist.all_reduce(torch.zeros(1))

    def copy_rate(self) -> float:
        """Measured by one rank, while the others wait."""
        rate = copy_rate() if self._seat.rank == 0 else 0.0
        torch.cuda.empty_cache()
        self.meet()
        return rate

    def case(self, collective: str, size: int) -> None:
        """Captures a graph of calls, and checks what one replay gives."""
        ranks, me = self._seat.ranks, self._seat.rank
        whole = max(1, size // ELEMENT.itemsize // ranks) * ranks
        share = whole // ranks
        given = {"all_gather": share, "all_reduce": max(1, size // ELEMENT.itemsize)}.get(collective, whole)
        got = {"reduce_scatter": share, "all_reduce": given}.get(collective, whole)
        # Whole numbers, whose sums are exact in whatever order they are taken.
        inputs = [(torch.arange(given) % 1000 + rank).to(ELEMENT) for rank in range(ranks)]
        x, out = inputs[me].cuda(), torch.zeros(got, dtype=ELEMENT, device="cuda")

        def call() -> None:
            match collective:
                case "all_reduce":
                    dist.all_reduce(out)
                case "all_gather":
                    _all_gather(out, x)
                case "reduce_scatter":
                    _reduce_scatter(out, x)
                case "all_to_all":
                    dist.all_to_all_single(out, x)

        with torch.cuda.stream(self._stream):
            if collective == "all_reduce":
                out.copy_(x)
            call()
        self._stream.synchronize()
        mine = slice(me * share, (me + 1) * share)
        expected = {
            "all_reduce": lambda: sum(inputs),
            "all_gather": lambda: torch.cat(inputs),
            "reduce_scatter": lambda: sum(inputs)[mine],
            "all_to_all": lambda: torch.cat([each[mine] for each in inputs]),
        }[collective]()
        if not torch.equal(out.cpu(), expected):
            raise AssertionError(f"{collective} of {size} bytes is wrong on rank {me}")
        # Sums that are summed again stay finite only if they are nothing.
        out.zero_()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        self.meet()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for _ in range(CALLS):
                call()

    def run(self, replays: int) -> list[float]:
        """Microseconds per call, one for each replay."""
        times = []
        for replay in range(replays + 2):
            self.meet()
            with torch.cuda.stream(self._stream):
                self._around[0].record()
                self._graph.replay()
                self._around[1].record()
            self._stream.synchronize()
            if replay >= 2:
                times.append(self._around[0].elapsed_time(self._around[1]) * 1e3 / CALLS)
        return times


@dataclasses.dataclass(frozen=True)
class Result:
    collective: str
    ranks: int
    size: int
    median_us: float
    p99_us: float
    floor_us: float

    def line(self) -> str:
        return (
            f"{self.collective:<14} {self.ranks:>5} {size_text(self.size):>8} | {self.median_us:9.1f} {self.p99_us:8.1f} |"
            f" {self.floor_us:8.2f} | {self.median_us / self.floor_us:8.2f}"
        )


def floor_us(collective: str, ranks: int, size: int, rate: float) -> float:
    """Every rank reads what it is given and writes what it gets; what comes from another must be read there, which is
    counted once, because a sum or a gathered block can be kept by whoever has read it."""
    given, got = {
        "all_reduce": (size, size),
        "all_gather": (size / ranks, size),
        "reduce_scatter": (size, size / ranks),
        "all_to_all": (size, size),
    }[collective]
    return ranks * (given + got) / rate


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="(default: 2 4 8)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes (default: 8 to 16 MiB)")
    parser.add_argument("--replays", type=int, default=20, help="of each graph (default: 20)")
    parser.add_argument("--results", default=str(RESULTS), help="folder for the files (default: bench/results)")
    parser.add_argument("--no-files", action="store_true", help="only print the table")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("there is no CUDA device here; python -m bench.collectives measures on the CPU")
        return 1
    head: dict[str, Any] = provenance()
    head["machine"]["gpu"] = torch.cuda.get_device_properties(0).name
    print(f"{head['machine']['gpu']}, commit {head['commit']}\n\n{HEADER}", flush=True)
    results: list[Result] = []
    try:
        for ranks in arguments.ranks:
            with eep.Rendezvous.temporary() as place:
                seats = [GroupSeat(rank, ranks, str(place.path)) for rank in range(ranks)]
                with started(run_rank, seats) as fleet:
                    rate = fleet.ask("copy_rate")[0]
                    head[f"copy_gb_per_s_{ranks}_ranks"] = round(rate / 1e3)
                    for collective in COLLECTIVES:
                        for size in arguments.sizes:
                            fleet.ask("case", collective, size)
                            # A replay is over when the last rank is.
                            times = [max(each) for each in zip(*fleet.ask("run", arguments.replays), strict=True)]
                            p99 = sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]
                            floor = floor_us(collective, ranks, size, rate)
                            results.append(Result(collective, ranks, size, statistics.median(times), p99, floor))
                            print(results[-1].line(), flush=True)
    except FleetError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    if not arguments.no_files:
        save(pathlib.Path(arguments.results), head, results)
    return 0


def save(folder: pathlib.Path, head: dict[str, Any], results: list[Result]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {**head, "calls_per_graph": CALLS, "cases": [dataclasses.asdict(result) for result in results]}
    (folder / "collectives-cuda.json").write_text(json.dumps(document, indent=1) + "\n")
    table = "\n".join([HEADER, *(result.line() for result in results)])
    note = f"`{head['command']}`, {head['date']}; {head['machine']['gpu']}, commit {head['commit']}"
    (folder / "collectives-cuda.md").write_text(f"{note}\n\n```\n{table}\n```\n")


if __name__ == "__main__":
    sys.exit(main())
