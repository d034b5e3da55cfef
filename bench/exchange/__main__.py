"""Compares dispatch and combine between real processes with memcpy and gloo's all_to_all_single of the same bytes.

One run measures all of them, in the same processes, in alternating blocks. A token goes once to each rank that
hosts one of its experts. "Bytes" are those rows (and fp8 scales), including what a rank sends to itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.common.arguments import add_files, add_quick, make_parser
from bench.common.fleet import Fleet, FleetError, start_ranks
from bench.common.provenance import provenance
from bench.common.result_files import say_written
from bench.exchange.measurement import BLOCKS, Result, measure
from bench.exchange.rank_process import ExchangeSeat, run_rank
from bench.exchange.report import header, row, summary, write_json
from bench.exchange.workload import SCALE_GROUP, WIRES, Shape
from eep import Rendezvous

HEADLINE = (4, 128)
"""Ranks and tokens of the case that the summary is about."""


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(
        "bench.exchange",
        __doc__,
        "Times run from the moment the first rank leaves a barrier until the last rank is done. The table\n"
        "shows medians over rounds, and the 90th percentile of EEP. Where ranks share cores the scheduler\n"
        "is part of every figure: compare columns, not machines.\n"
        "Files: dispatch_combine-DEVICE.json and plots.\n\n"
        "examples:\n"
        "  python -m bench.exchange             everything, about three minutes\n"
        "  python -m bench.exchange --quick     does it work? a few seconds\n"
        "  python -m bench.exchange --ranks 4 --tokens 128 --seconds 20   one case, carefully\n"
        "  python -m bench.exchange --wire fp8 --hidden 7168              another format and size",
    )
    parser.add_argument(
        "--ranks", type=_numbers(2, 16), default=[2, 4, 8, 16], help="numbers of ranks (default: 2,4,8,16)"
    )
    parser.add_argument(
        "--tokens",
        type=_numbers(1, 65535),
        default=[2**power for power in range(11)],
        help="tokens per rank; the largest is the capacity of the buffers (default: 1,2,4,...,1024)",
    )
    parser.add_argument("--hidden", type=int, default=2048, help="values per token (default: 2048)")
    parser.add_argument(
        "--experts", type=int, default=64, help="experts of all ranks; a multiple of every --ranks (default: 64)"
    )
    parser.add_argument("--topk", type=int, default=8, help="experts per token (default: 8)")
    parser.add_argument("--wire", choices=WIRES, default="bf16", help="format of dispatched rows (default: bf16)")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the tensors live; cuda has its own cases and needs an MPS daemon (tests/gpu/with_mps.sh)",
    )
    parser.add_argument("--replays", type=int, default=20, help="how often to replay each graph, on cuda (default: 20)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each case, about (default: 2)")
    add_quick(parser)
    add_files(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.tokens, arguments.seconds = [2, 4], [1, 128], 0.3
        arguments.no_files = True
    if problem := _problem(arguments):
        parser.error(problem)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.device == "cuda":
        from bench.exchange.cuda_report import run

        return run(arguments)
    shape = Shape(arguments.hidden, arguments.topk, arguments.experts, arguments.wire)
    subject = f"hidden {shape.hidden}, top-{shape.topk} of {shape.experts} experts, {shape.wire}"
    head = provenance()
    machine = head["machine"]
    print(f"{subject}\n{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}")
    print(f"commit {head['commit']}\n\n{header()}", flush=True)
    began = time.monotonic()
    try:
        results = run_cases(arguments, shape)
    except FleetError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    headline = next((result for result in results if (result.ranks, result.tokens) == HEADLINE), None)
    if headline:
        print(f"\n{summary(headline)}")
    print(f"\nmeasured in {time.monotonic() - began:.0f} s")
    if not arguments.no_files:
        head["parameters"] = {
            **dataclasses.asdict(shape),
            "device": arguments.device,
            "layout": "rank",
            "seconds_per_case": arguments.seconds,
            "blocks": BLOCKS,
        }
        save(arguments, head, results, headline, subject)
    return 0


@contextlib.contextmanager
def fleet(ranks: int, shape: Shape, max_tokens: int) -> Iterator[Fleet]:
    """``ranks`` connected processes for the length of a with block; none of them outlives it."""
    with Rendezvous.temporary() as rendezvous:
        seats = [ExchangeSeat(rank, ranks, shape, max_tokens, str(rendezvous.path)) for rank in range(ranks)]
        with start_ranks(run_rank, seats) as ready:
            yield ready


def run_cases(arguments: argparse.Namespace, shape: Shape) -> list[Result]:
    """Measures every case, and prints each as it is done."""
    results = []
    for ranks in arguments.ranks:
        with fleet(ranks, shape, max(arguments.tokens)) as ready:
            for tokens in arguments.tokens:
                results.append(measure(ready, ranks, tokens, shape, arguments.seconds))
                print(row(results[-1]), flush=True)
    return results


def save(
    arguments: argparse.Namespace, head: dict[str, Any], results: list[Result], headline: Result | None, subject: str
) -> None:
    """Writes the JSON file, and the plots for which there are enough cases."""
    from bench.exchange.plots import (  # matplotlib takes a while to import, and not every run needs it
        plot_ranks,
        plot_tokens,
    )

    name = f"dispatch_combine-{arguments.device}"
    if arguments.wire != "bf16":
        name += f"-{arguments.wire}"
    written = [arguments.results / f"{name}.json"]
    write_json(written[0], head, results, headline)
    if len(arguments.tokens) > 1:
        written.append(arguments.results / f"{name}-tokens.png")
        plot_tokens(results, subject, written[-1])
    if len(arguments.ranks) > 1:
        tokens = HEADLINE[1] if HEADLINE[1] in arguments.tokens else arguments.tokens[-1]
        written.append(arguments.results / f"{name}-ranks.png")
        plot_ranks(results, tokens, subject, written[-1])
    say_written(written)


def _problem(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, if anything."""
    for ranks in arguments.ranks:
        if arguments.experts % ranks:
            return f"--experts must be a multiple of every --ranks: {arguments.experts} is not a multiple of {ranks}"
    if not 1 <= arguments.topk <= min(16, arguments.experts):
        return f"--topk must be between 1 and {min(16, arguments.experts)}"
    if arguments.hidden < 1 or (arguments.wire.startswith("fp8") and arguments.hidden % SCALE_GROUP):
        return f"--hidden must be positive, and for fp8 a multiple of {SCALE_GROUP}"
    if not 0 < arguments.seconds <= 600:
        return "--seconds must be positive and at most 600"
    return None


def _numbers(least: int, most: int) -> Callable[[str], list[int]]:
    """Parses "2,4,8" into ascending numbers within bounds."""

    def parse(text: str) -> list[int]:
        try:
            numbers = sorted({int(part) for part in text.split(",")})
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 2,4,8") from None
        if not least <= numbers[0] <= numbers[-1] <= most:
            raise argparse.ArgumentTypeError(f"must be between {least} and {most}")
        return numbers

    return parse


if __name__ == "__main__":
    sys.exit(main())
