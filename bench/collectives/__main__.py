"""Compares collectives of the backend eep with those of gloo, on CPU tensors, through torch.distributed.

One run measures both, in the same processes, which have a group of each and take turns in short blocks. The
calls of a block follow right after each other. The time of a call runs from the moment the last rank was done
with the call before to the moment the last rank was done with this one. The size is that of the larger tensor
that a rank gives or gets.

With --hosts the ranks are shared among so many network namespaces of this machine, joined by a bridge: eep's links cross
over libfabric's TCP, and gloo over its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.collectives.rank import COLLECTIVES, CONTENDERS, ELEMENT, GroupSeat, HostPlace, run_rank
from bench.collectives.report import Result, Timing, header, plot, row, summary
from bench.common import network_namespaces
from bench.common.arguments import add_files, add_quick, make_parser
from bench.common.fleet import Fleet, FleetError, start_ranks
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from eep import Rendezvous

BLOCKS = 6
"""How many turns each contender takes."""
_FEWEST_CALLS, _MOST_CALLS = 2, 400  # per block


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(
        "bench.collectives",
        __doc__,
        "Where ranks share cores the scheduler is part of every figure: compare columns, not machines.\n"
        "Files: collectives-cpu.json, .md and .png; with --hosts, which needs root, collectives-hosts-cpu.\n"
        "On a GPU, use 'python -m bench.collectives.cuda'.\n\n"
        "examples:\n"
        "  python -m bench.collectives             everything, three to five minutes\n"
        "  python -m bench.collectives --quick     does it work? a few seconds\n"
        "  python -m bench.collectives --hosts 2   between hosts\n"
        "  python -m bench.collectives --ranks 4 --collectives all_reduce --seconds 5",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks (default: 2 4 8)")
    parser.add_argument("--hosts", type=int, default=1, help="on so many hosts, in namespaces (default: 1)")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20],
        help="sizes of the larger tensor in bytes (default: 8 to 64 MiB)",
    )
    parser.add_argument(
        "--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES), help="which ones (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=0.8, help="time for each case, about (default: 0.8)")
    add_quick(parser)
    add_files(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.sizes, arguments.seconds = [2, 4], [8, 32 << 10, 2 << 20], 0.3
        arguments.no_files = True
    if arguments.hosts < 1 or any(ranks % arguments.hosts for ranks in arguments.ranks):
        parser.error("--hosts must be at least 1, and each of --ranks a multiple of it")
    if not all(2 <= ranks <= 64 for ranks in arguments.ranks):
        parser.error("--ranks must be between 2 and 64")
    if not all(1 <= size <= 1 << 30 for size in arguments.sizes):
        parser.error("--sizes must be between 1 and 1073741824")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.hosts > 1 and (reason := network_namespaces.why_not()):
        print(reason, file=sys.stderr)
        return 1
    head = provenance()
    machine = head["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, load {machine['load_average']}")
    print(f"commit {head['commit']}\n\n{header()}", flush=True)
    began = time.monotonic()
    try:
        results = run_cases(arguments)
    except FleetError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\n{summary(results)}\n\nmeasured in {time.monotonic() - began:.0f} s")
    if not arguments.no_files:
        machine["load_average_after"] = round(os.getloadavg()[0], 2)
        head["parameters"] = {"seconds_per_case": arguments.seconds, "blocks": BLOCKS, "element": str(ELEMENT)}
        head["parameters"]["hosts"] = arguments.hosts
        save(arguments.results, head, results)
    return 0


def run_cases(arguments: argparse.Namespace) -> list[Result]:
    """Measures every case, and prints each as it is done."""
    results = []
    for ranks in arguments.ranks:
        with Rendezvous.temporary() as rendezvous, hosts_of(arguments.hosts, ranks) as hosts:
            seats = [GroupSeat(rank, ranks, str(rendezvous.path), hosts[rank]) for rank in range(ranks)]
            with start_ranks(run_rank, seats) as fleet:
                for collective in arguments.collectives:
                    for size in sorted(arguments.sizes):
                        results.append(measure(fleet, collective, ranks, size, arguments.seconds))
                        print(row(results[-1]), flush=True)
    return results


@contextlib.contextmanager
def hosts_of(hosts: int, ranks: int) -> Iterator[list[HostPlace | None]]:
    """The host of each rank."""
    if hosts == 1:
        yield [None] * ranks
        return
    network = network_namespaces.Network(hosts)
    try:
        numbers = [rank * hosts // ranks for rank in range(ranks)]
        yield [HostPlace(network.namespace(number), network.address(number)) for number in numbers]
    finally:
        network.close()


def measure(fleet: Fleet, collective: str, ranks: int, size: int, seconds: float) -> Result:
    """Measures one case in about ``seconds``, half of it for each contender."""
    fleet.ask("case", collective, size)
    fleet.ask("verify")
    share_us = 1e6 * seconds / len(CONTENDERS) / BLOCKS
    calls = {}
    for name in CONTENDERS:
        cost_us = statistics.median(_call_times(fleet.ask("run", name, 3)))  # warms up, and shows how many calls fit
        calls[name] = max(_FEWEST_CALLS, min(_MOST_CALLS, int(share_us / cost_us)))
    samples: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for block in range(BLOCKS):
        for turn in range(len(CONTENDERS)):
            name = CONTENDERS[(block + turn) % len(CONTENDERS)]
            # The first call of a block finds ranks that come from a barrier, and cold caches.
            samples[name] += _call_times(fleet.ask("run", name, calls[name] + 1))[1:]
    return Result(collective, ranks, size, {name: _timing(samples[name]) for name in CONTENDERS})


def _call_times(answers: list[list[int]]) -> list[float]:
    """The microseconds of each call, from the times that every rank has noted."""
    ends = [max(moments) for moments in zip(*answers, strict=True)]
    return [(after - before) / 1e3 for before, after in itertools.pairwise(ends)]


def _timing(times_us: list[float]) -> Timing:
    p99 = statistics.quantiles(times_us, n=100, method="inclusive")[-1]
    return Timing(round(statistics.median(times_us), 2), round(p99, 2), len(times_us))


def save(folder: pathlib.Path, head: dict[str, Any], results: list[Result]) -> None:
    """Writes the JSON file, the table and the picture."""
    machine = head["machine"]
    hosts = head["parameters"]["hosts"]
    subject = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, commit {head['commit']}"
    if hosts > 1:
        subject += f", {hosts} hosts in network namespaces"
    document = {**head, "cases": [result.as_json() for result in results]}
    table = "\n".join([header(), *map(row, results)])
    load = f"load {machine['load_average']} before, {machine['load_average_after']} after"
    note = f"`{head['command']}`, {head['date']}; {subject}; {load}"
    page = f"{note}\n\n```\n{table}\n```\n\n{summary(results)}\n"
    name = "collectives-cpu" if hosts == 1 else "collectives-hosts-cpu"
    write_results(folder / name, document, page, partial(plot, results, subject))


if __name__ == "__main__":
    sys.exit(main())
