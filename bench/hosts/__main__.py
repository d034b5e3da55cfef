"""Compares dispatch and combine between two hosts with gloo's all_to_all_single and a plain TCP loop of the same bytes.

The hosts are network namespaces of this machine, joined by a bridge. All three are measured in one run, in the same
processes, in alternating blocks. The TCP loop moves only the bytes that cross; EEP and gloo also move those that stay.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import Any

from bench.common import network_namespaces
from bench.common.arguments import add_files, add_quick, make_parser
from bench.common.fleet import FleetError, start_ranks
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.exchange.measurement import DIRECTIONS, Result, measure
from bench.exchange.workload import Shape
from bench.hosts.host_rank import CONTENDERS, HostSeat, run_host_rank
from bench.hosts.many_links import BARRIERS, PEERS, measure_links, table_of
from eep import Rendezvous

CASES = ((2, 1), (2, 16), (2, 128), (2, 1024), (4, 128), (4, 1024))
"""Ranks and tokens."""


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(
        "bench.hosts",
        __doc__,
        "Times run from the moment the first rank leaves a barrier until the last rank is done; medians in\n"
        "microseconds. Ranks and their proxies share the cores of one machine: compare columns, not machines.\n"
        "Needs root, for network namespaces. Files: hosts-cpu.json and hosts-cpu.md, hosts-links-cpu.json and .md.\n\n"
        "examples:\n"
        "  python -m bench.hosts             the exchange, about two minutes\n"
        "  python -m bench.hosts --links     what one rank pays for links to many hosts, under a minute\n"
        "  python -m bench.hosts --quick     does it work? a few seconds",
    )
    parser.add_argument("--hidden", type=int, default=2048, help="values per token (default: 2048)")
    parser.add_argument("--provider", default="tcp", help="provider of libfabric (default: tcp)")
    parser.add_argument("--seconds", type=float, default=12.0, help="time for each case, about (default: 12)")
    parser.add_argument("--links", action="store_true", help="barriers of one rank with many remote peers instead")
    add_quick(parser)
    add_files(parser)
    arguments = parser.parse_args()
    if arguments.hidden < 1 or arguments.seconds <= 0:
        parser.error("--hidden and --seconds must be positive")
    if arguments.quick:
        arguments.seconds, arguments.no_files = 0.3, True
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if reason := network_namespaces.why_not():
        print(reason, file=sys.stderr)
        return 1
    if arguments.links:
        return compare_links(arguments)
    shape = Shape(arguments.hidden, topk=8, experts=64, wire="bf16")
    head = provenance()
    print(f"commit {head['commit']}\n\n" + "\n".join(header()), flush=True)
    began = time.monotonic()
    results = []
    try:
        for ranks in (2, 4):
            tokens = [case[1] for case in CASES if case[0] == ranks]
            for result in run_cases(ranks, tokens[:1] if arguments.quick else tokens, shape, arguments):
                results.append(result)
                print(row(result), flush=True)
    except FleetError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(f"\nmeasured in {time.monotonic() - began:.0f} s")
    if not arguments.no_files:
        save(arguments, head, results)
    return 0


def run_cases(ranks: int, tokens: list[int], shape: Shape, arguments: argparse.Namespace) -> list[Result]:
    """Every case of so many ranks, half of them on each of two hosts."""
    network = network_namespaces.Network(2)
    try:
        with Rendezvous.temporary() as rendezvous:
            spaces, addresses = (tuple(each(host) for host in (0, 1)) for each in (network.namespace, network.address))
            seats = [
                HostSeat(rank, ranks, shape, max(tokens), str(rendezvous.path), spaces, addresses, arguments.provider)
                for rank in range(ranks)
            ]
            with start_ranks(run_host_rank, seats) as fleet:
                return [measure(fleet, ranks, each, shape, arguments.seconds, CONTENDERS) for each in tokens]
    finally:
        network.close()


def compare_links(arguments: argparse.Namespace) -> int:
    head = provenance()
    counts, barriers = (PEERS[:2], 10) if arguments.quick else (PEERS, BARRIERS)
    try:
        costs = [measure_links(peers, barriers, arguments.provider) for peers in counts]
    except FleetError as error:
        print(error, file=sys.stderr)
        return 1
    print(table_of(costs))
    if not arguments.no_files:
        page = (
            "# Links of one rank to many hosts\n\n"
            f"`{head['command']}`, commit {head['commit']},\n{head['machine']['cpu']}, {head['machine']['cores']} cores. "
            f"Provider {arguments.provider}. One rank with so many\nremote peers, which know it only; "
            f"{barriers} barriers. Microseconds; CPU is that of the process of the one rank.\n\n{table_of(costs)}\n"
        )
        content = {**head, "barriers": barriers, "results": [asdict(cost) for cost in costs]}
        write_results(arguments.results / "hosts-links-cpu", content, page)
    return 0


def header() -> list[str]:
    columns = ["ranks", "tokens", "KB out"]
    columns += [f"{name} {way}" for way in DIRECTIONS for name in CONTENDERS]
    return [f"| {' | '.join([*columns, 'gloo / eep', 'tcp / eep'])} |", "|" + "---:|" * (len(columns) + 2)]


def row(result: Result) -> str:
    times = [f"{result.median(name, way):.0f}" for way in DIRECTIONS for name in CONTENDERS]
    ratios = [f"{result.total(name) / result.total('eep'):.2f}" for name in CONTENDERS[1:]]
    size = f"{result.bytes_per_rank['dispatch'] / 1000:.0f}"
    return f"| {' | '.join([str(result.ranks), str(result.tokens), size, *times, *ratios])} |"


def save(arguments: argparse.Namespace, head: dict[str, Any], results: list[Result]) -> None:
    head["parameters"] = {"hidden": arguments.hidden, "provider": arguments.provider, "hosts": 2}
    content = {**head, "results": [result.as_json() for result in results]}
    machine = head["machine"]
    page = (
        "# Dispatch and combine between two hosts\n\n"
        f"`{head['command']}`, commit {head['commit']}, {machine['cpu']}, {machine['cores']} cores for all ranks, their\n"
        f"proxies and both hosts, which are network namespaces. Provider {arguments.provider}, hidden {arguments.hidden},\n"
        "bf16, top-8 of 64. Medians in microseconds. `KB out`: what a rank sends, itself included; the TCP loop moves\n"
        "only what crosses.\n\n" + "\n".join([*header(), *map(row, results)]) + "\n"
    )
    write_results(arguments.results / "hosts-cpu", content, page)


if __name__ == "__main__":
    sys.exit(main())
