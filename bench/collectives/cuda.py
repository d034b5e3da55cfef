"""Times collectives of the backend eep on CUDA tensors, several ranks on one GPU, as replays of captured graphs.

NCCL refuses two ranks on one GPU, so there is no other backend to compare with. Beside each time stands the *byte floor*:
how long the device takes to copy the bytes that the collective must at least read and write, all ranks together. The size
is that of the larger tensor that a rank gives or gets, and at least one value for each rank. Run it under an MPS daemon
(tests/gpu/with_mps.sh); without one the ranks take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import pathlib
import statistics
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import eep
from bench.collectives.rank import COLLECTIVES, ELEMENT, GroupSeat, all_gather, reduce_scatter
from bench.collectives.report import size_text
from bench.common.arguments import add_files, make_parser
from bench.common.copy_rate import copy_rate
from bench.common.fleet import FleetError, serve_requests, start_ranks
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.common.timing import percentile

CALLS = 20  # per graph
SIZES = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20]
HEADER = f"{'collective':<14} {'ranks':>5} {'size':>8} | {'median us':>9} {'p99 us':>8} | {'floor us':>8} | time/floor"


def run_rank(seat: GroupSeat, pipe: Connection) -> None:
    """The life of a rank process."""
    serve_requests(lambda: CudaGroupRank(seat), pipe)


class CudaGroupRank:
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

    def close(self) -> None:
        dist.destroy_process_group()

    def meet(self) -> None:
        """Waits for the other ranks, on the CPU."""
        dist.all_reduce(torch.zeros(1))

    def copy_rate(self) -> float:
        """Rank 0 measures it while the others wait."""
        rate = copy_rate() if self._seat.rank == 0 else 0.0
        torch.cuda.empty_cache()
        self.meet()
        return rate

    def case(self, collective: str, size: int) -> None:
        """Checks what one call gives, then captures a graph of calls."""
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
                    all_gather(out, x)
                case "reduce_scatter":
                    reduce_scatter(out, x)
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
        # Every replay adds up again in place: sums of zeros stay finite.
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
class CudaResult:
    """One case: what a call takes, and the byte floor."""

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
    """Every rank reads what it is given and writes what it gets. It must read each tensor of a peer as well, but that counts
    once: a rank may keep a sum or a gathered block that it has read."""
    given, got = {
        "all_reduce": (size, size),
        "all_gather": (size / ranks, size),
        "reduce_scatter": (size, size / ranks),
        "all_to_all": (size, size),
    }[collective]
    return ranks * (given + got) / rate


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(
        "bench.collectives.cuda",
        __doc__,
        "Files: collectives-cuda.json and .md. On the CPU, 'python -m bench.collectives' compares with gloo.",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks (default: 2 4 8)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="sizes of the larger tensor in bytes (default: 8 to 16 MiB)"
    )
    parser.add_argument("--replays", type=int, default=20, help="how often to replay each graph (default: 20)")
    add_files(parser)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("this machine has no CUDA device; 'python -m bench.collectives' measures on the CPU")
        return 1
    head: dict[str, Any] = provenance()
    head["machine"]["gpu"] = torch.cuda.get_device_properties(0).name
    print(f"{head['machine']['gpu']}, commit {head['commit']}\n\n{HEADER}", flush=True)
    results: list[CudaResult] = []
    try:
        for ranks in arguments.ranks:
            with eep.Rendezvous.temporary() as place:
                seats = [GroupSeat(rank, ranks, str(place.path)) for rank in range(ranks)]
                with start_ranks(run_rank, seats) as fleet:
                    rate = fleet.ask("copy_rate")[0]
                    head[f"copy_gb_per_s_{ranks}_ranks"] = round(rate / 1e3)
                    for collective in COLLECTIVES:
                        for size in arguments.sizes:
                            fleet.ask("case", collective, size)
                            # A replay is over when its last rank is.
                            times = [max(each) for each in zip(*fleet.ask("run", arguments.replays), strict=True)]
                            median, p99 = statistics.median(times), percentile(times, 0.99)
                            floor = floor_us(collective, ranks, size, rate)
                            results.append(CudaResult(collective, ranks, size, median, p99, floor))
                            print(results[-1].line(), flush=True)
    except FleetError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    if not arguments.no_files:
        save(arguments.results, head, results)
    return 0


def save(folder: pathlib.Path, head: dict[str, Any], results: list[CudaResult]) -> None:
    """Writes the JSON file and the table."""
    document = {**head, "calls_per_graph": CALLS, "cases": [dataclasses.asdict(result) for result in results]}
    table = "\n".join([HEADER, *(result.line() for result in results)])
    note = f"`{head['command']}`, {head['date']}; {head['machine']['gpu']}, commit {head['commit']}"
    write_results(folder / "collectives-cuda", document, f"{note}\n\n```\n{table}\n```\n")


if __name__ == "__main__":
    sys.exit(main())
