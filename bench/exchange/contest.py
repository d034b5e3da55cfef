"""Compares what a round of dispatch and combine takes with what it would take otherwise: without what survival costs, with
kernels that overlap, on a GPU that is shared, with room for more tokens, in the other layout.

Ranks are processes on one GPU, under MPS. All contenders of a shape take turns in the same processes, and each has delivered
right before it is timed. A ratio is that of the medians of two neighbouring blocks; told are the median of all and the
quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.common.arguments import add_files, make_parser
from bench.common.copy_rate import copy_rate
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.exchange.contestants import CONTENDERS, FLASHINFER, FLASHINFER_TEXTS, NVSHMEM, NVSHMEM_TEXTS, TEXTS
from bench.exchange.cuda_fleet import CudaFleet, start_cuda_ranks
from bench.exchange.cuda_rank import Case
from bench.exchange.cuda_report import floor_us
from bench.exchange.flashinfer.library import INSTALLED, build, find
from bench.exchange.nvshmem.pe_fleet import started_pes
from bench.exchange.nvshmem.pes import variables
from bench.exchange.nvshmem.put_contender import heap_bytes_of
from bench.exchange.nvshmem.put_library import build_puts, find_nvshmem, version_of

HIDDEN = 7168
STATION_REPLAYS = 25


def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        print("this machine has no CUDA device")
        return 1
    contenders = {name: CONTENDERS[name] for name in options.only}
    if options.flashinfer is not None:
        library = str(build(find(options.flashinfer), Path("build/flashinfer").absolute()))
        contenders |= {name: {**given, "flashinfer": library} for name, given in FLASHINFER.items()}
        # A kernel that is loaded at its first launch waits for those that wait for it.
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    head = provenance()
    puts, heap_bytes = "", 0
    if options.nvshmem is not None:
        package = find_nvshmem(None if options.nvshmem == Path() else options.nvshmem)
        puts, heap_bytes = str(build_puts(package, Path("build/nvshmem").absolute())), most_heap_bytes(options)
        contenders |= {name: {**given, "nvshmem": puts} for name, given in NVSHMEM.items()}
        os.environ |= {**variables(heap_bytes), **os.environ}  # what the caller has set stays
        head["nvshmem"] = {"version": version_of(package)}
    head["machine"]["gpu"] = torch.cuda.get_device_properties(0).name
    head["setting"] = {"hidden": HIDDEN, "blocks": options.blocks, "replays": options.replays}
    shapes = []
    with start_cuda_ranks("processes", max(options.ranks)) as fleet, contextlib.ExitStack() as stopping:
        rate = fleet.ask_one(copy_rate)
        head["copy_gb_per_s"] = rate / 1e3
        if puts:
            head["nvshmem"]["says"] = stopping.enter_context(started_pes(fleet, puts, heap_bytes))
            print(f"NVSHMEM {head['nvshmem']['version']}: {head['nvshmem']['says']}", flush=True)
        for case in shapes_of(options):
            shapes.append(measure(fleet, case, contenders, options, rate))
            print(line(shapes[-1]), flush=True)
            if options.stations:
                shapes[-1]["stations_us"] = stations(fleet, case, contenders, shapes[-1])
                print("\n".join(station_table(shapes[-1]["stations_us"])), flush=True)
    told = {**head, "shapes": shapes}
    if not options.no_files:
        write_results(options.results / "contest-cuda", told, page(told))
    return 0


def shapes_of(options: argparse.Namespace) -> list[Case]:
    return [
        Case(ranks, tokens, HIDDEN, wire)
        for ranks in options.ranks
        for wire in options.wires
        for tokens in options.tokens
    ]


def most_heap_bytes(options: argparse.Namespace) -> int:
    """What the exchanges through NVSHMEM take at each rank, in the largest shape."""
    return max(heap_bytes_of([replace(case, **given) for given in NVSHMEM.values()]) for case in shapes_of(options))


def parse() -> argparse.Namespace:
    parser = make_parser(
        "bench.exchange.contest",
        __doc__,
        "Needs a GPU and an MPS daemon (tests/gpu/with_mps.sh). Files: contest-cuda.json and contest-cuda.md.\n\n"
        "examples:\n"
        "  python -m bench.exchange.contest                                       everything, five minutes\n"
        "  python -m bench.exchange.contest --ranks 8 --tokens 1,8 --only eep,fixed --no-files\n"
        "  python -m bench.exchange.contest --wires bf16 --only eep,fixed --nvshmem       beside PEs that are fixed",
    )
    parser.add_argument("--ranks", type=_numbers, default=[8, 4], help="numbers of ranks (default: 8,4)")
    parser.add_argument(
        "--tokens", type=_numbers, default=[1, 8, 32, 128, 512, 1024], help="per rank (default: 1,8,32,128,512,1024)"
    )
    parser.add_argument("--wires", type=_names, default=["bf16", "fp8"], help="formats of rows (default: bf16,fp8)")
    parser.add_argument("--only", type=_names, default=list(CONTENDERS), help="these contenders, eep among them")
    parser.add_argument(
        "--flashinfer",
        type=Path,
        metavar="FOLDER",
        nargs="?",
        const=INSTALLED,
        help="measure FlashInfer beside it; FOLDER is 'flashinfer' of the package flashinfer-python 0.7.2, installed or "
        "unpacked; without one, where Python finds it. Its kernels are built with nvcc, into build/flashinfer",
    )
    parser.add_argument(
        "--stations",
        action="store_true",
        help="tell, too, when the blocks of rank 0 pass the stations of a round, for all contenders that are of eep and not "
        "fixed; noting that takes time of its own",
    )
    parser.add_argument(
        "--nvshmem",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FOLDER",
        help="measure the exchange through NVSHMEM beside it, with bf16 rows; FOLDER is 'nvidia/nvshmem' of the package "
        "nvidia-nvshmem-cu13, unpacked (default: the installed one). Its kernels are built with nvcc, into build/nvshmem",
    )
    parser.add_argument("--blocks", type=int, default=10, help="turns of each contender (default: 10)")
    parser.add_argument("--replays", type=int, default=4, help="graphs of 20 rounds in a block (default: 4)")
    add_files(parser)
    options = parser.parse_args()
    if unknown := set(options.only) - set(CONTENDERS):
        parser.error(f"no contender is called {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    if options.only[0] != "eep":
        parser.error("--only must name eep first, with which the others are compared")
    if options.blocks < 2 or options.replays < 1 or min(options.tokens) < 1 or min(options.ranks) < 2:
        parser.error("--blocks must be at least 2, --replays and --tokens 1, --ranks 2")
    if options.nvshmem is not None and options.wires != ["bf16"]:
        parser.error("--nvshmem measures rows of bf16 alone; say --wires bf16")
    return options


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def measure(
    fleet: CudaFleet, case: Case, contenders: dict[str, dict[str, Any]], options: argparse.Namespace, rate: float
) -> dict[str, Any]:
    """One shape, all contenders."""
    cases = [replace(case, **given) for given in contenders.values()]
    times = fleet.contest(cases, options.blocks, options.replays)
    blocks = {
        name: [statistics.median(seen[at : at + options.replays]) for at in range(0, len(seen), options.replays)]
        for name, seen in zip(contenders, times, strict=True)
    }
    return {
        "ranks": case.ranks,
        "tokens": case.tokens,
        "wire": case.wire,
        "floor_us": round(floor_us(case, rate), 2),
        "contenders": {
            name: {"round_us": spread(blocks[name]), "over_eep": spread(ratios(blocks[name], blocks["eep"]))}
            for name in contenders
        },
    }


def stations(
    fleet: CudaFleet, case: Case, contenders: dict[str, dict[str, Any]], shape: dict[str, Any]
) -> dict[str, dict[str, list[float]]]:
    """When rank 0 passes the stations of a round, by contender: its first and its last block. The round of all ranks ends
    with the next start, as it was measured without any instrument."""
    told = {}
    for name, given in contenders.items():
        if "flashinfer" in given or "fixed" in given:
            continue
        passed = fleet.stations(replace(case, **given), STATION_REPLAYS)
        whole = shape["contenders"][name]["round_us"][0]
        times = {station: [round(first, 2), round(last, 2)] for station, (first, last) in passed.items()}
        told[name] = {**times, "the next round": [whole, whole]}
    return told


def station_table(told: dict[str, dict[str, list[float]]]) -> list[str]:
    """As Markdown."""
    return [
        f"| station | {' | '.join(told)} |",
        f"|---|{'---:|' * len(told)}",
        *(
            f"| {station} | {' | '.join('{:.1f} to {:.1f}'.format(*passed[station]) for passed in told.values())} |"
            for station in next(iter(told.values()))
        ),
    ]


def ratios(blocks: list[float], of: list[float]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(blocks, of, strict=True)]


def spread(values: list[float]) -> list[float]:
    """The median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(value, 4) for value in (middle, low, high)]


def line(shape: dict[str, Any]) -> str:
    told = ", ".join(f"{name} {found['round_us'][0]:.1f}" for name, found in shape["contenders"].items())
    return f"{shape['ranks']} ranks, {shape['tokens']:>4} tokens, {shape['wire']:<4}: {told}; floor {shape['floor_us']:.1f}"


def page(told: dict[str, Any]) -> str:
    machine, names = told["machine"], list(told["shapes"][0]["contenders"])
    others = [name for name in names if name != "eep"]
    lines = [
        "# A round of dispatch and combine, and what it would take otherwise",
        "",
        f"`{told['command']}`, commit {told['commit']}, {told['date']}.",
        f"{machine['gpu']}, shared by the ranks under MPS; torch {machine['torch']}; a copy moves "
        f"{told['copy_gb_per_s']:.0f} GB/s.",
        f"Hidden {told['setting']['hidden']}, top-8 of 256 experts; {told['setting']['blocks']} blocks of "
        f"{told['setting']['replays']} graphs of 20 rounds each, in turns; the slowest rank counts.",
        *([f"NVSHMEM {told['nvshmem']['version']}: {told['nvshmem']['says']}."] if "nvshmem" in told else []),
        "",
        *(f"- {name}: {(TEXTS | FLASHINFER_TEXTS | NVSHMEM_TEXTS)[name]}" for name in names),
        "",
        "Microseconds a round, median (quartiles); of the others, how many times as long as `eep`.",
        "",
        f"| ranks, wire | tokens | byte floor | eep | {' | '.join(others)} |",
        f"|---|---:|---:|---:|{'---:|' * len(others)}",
    ]
    for shape in told["shapes"]:
        found = shape["contenders"]
        middle, low, high = found["eep"]["round_us"]
        cells = [f"{middle:.1f} ({low:.1f} to {high:.1f})"]
        for name in others:
            middle, low, high = found[name]["over_eep"]
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        head = f"| {shape['ranks']}, {shape['wire']} | {shape['tokens']} | {shape['floor_us']:.1f} | "
        lines.append(head + " | ".join(cells) + " |")
    for shape in told["shapes"]:
        if "stations_us" in shape:
            lines += [
                "",
                f"{shape['ranks']} ranks, {shape['wire']}, {shape['tokens']} tokens: when the first and the last block of "
                "rank 0 pass the stations of a round, in us",
                "",
                *station_table(shape["stations_us"]),
            ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
