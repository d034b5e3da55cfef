"""The GPU side of ``python -m bench.exchange``: which cases, the table, the JSON file and the plot."""

from __future__ import annotations

import argparse
import pathlib
from functools import partial
from typing import Any

import torch

from bench.common.copy_rate import copy_rate
from bench.common.provenance import provenance
from bench.common.result_files import write_results
from bench.exchange.cuda_fleet import CudaFleet, start_cuda_ranks
from bench.exchange.cuda_rank import Case, exchanged_rows
from bench.exchange.cuda_yardsticks import batched_copy_rate, torch_round_us

BARS_US = {"dispatch": 31.0, "combine": 41.0, "fp8 dispatch": 25.0}
"""The targets for 8 ranks, 128 tokens, hidden 7168, top-8 of 256."""
HEADER = (
    "ranks  are        tokens hidden wire  fixed | round us   p99 | dispatch   p99 | combine   p99 |"
    " floor us | round/floor"
)


def cases(arguments: argparse.Namespace) -> list[Case]:
    if arguments.quick:
        return [Case(8, 128, 7168), Case(8, 128, 7168, fixed=True), Case(8, 128, 7168, "fp8"), Case(4, 128, 7168)]
    chosen = []
    for ranks in (2, 4, 8):
        for hidden in (7168, 2048):
            chosen += [Case(ranks, tokens, hidden) for tokens in (1, 8, 32, 128, 512, 1024)]
            chosen.append(Case(ranks, 128, hidden, "fp8"))
    # Both kinds next to each other, more than once, because their difference is small.
    chosen += [Case(8, 128, 7168, fixed=fixed) for _ in range(3) for fixed in (False, True)]
    return chosen


def floor_us(case: Case, rate: float) -> float:
    """The time that a copy of the same bytes takes. A dispatch reads each row once and writes what it sends; a combine does
    the reverse."""
    sent, own = exchanged_rows(case), case.ranks * case.tokens
    wire_bytes = case.hidden + case.hidden // 32 if case.wire.startswith("fp8") else case.hidden * 2
    dispatch = own * case.hidden * 2 + sent * wire_bytes
    combine = (own + sent) * case.hidden * 2
    return (dispatch + combine) / rate


def line(result: dict[str, Any]) -> str:
    return (
        f"{result['ranks']:>5}  {result['ranks_are']:<10} {result['tokens']:>6} {result['hidden']:>6} {result['wire']:<5}"
        f" {'yes' if result['fixed'] else 'no':>5} | {result['round_us']:8.1f} {result['round_p99_us']:5.0f} |"
        f" {result['dispatch_us']:8.1f} {result['dispatch_p99_us']:5.0f} |"
        f" {result['combine_us']:7.1f} {result['combine_p99_us']:5.0f} |"
        f" {result['floor_us']:8.1f} | {result['round_us'] / result['floor_us']:6.2f}"
    )


def run(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("this machine has no CUDA device; leave --device out to measure on the CPU")
        return 1
    head = provenance()
    head["machine"]["gpu"] = torch.cuda.get_device_properties(0).name
    results = []
    for kind in ("processes", "streams"):
        with start_cuda_ranks(kind, 8) as fleet:
            rate = fleet.ask_one(copy_rate)
            head[f"copy_gb_per_s_{kind}"] = rate / 1e3
            print(
                f"{head['machine']['gpu']}, copy rate {rate / 1e3:.0f} GB/s, commit {head['commit']}\n\n{HEADER}",
                flush=True,
            )
            if kind == "processes":
                head["batched_copy_gb_per_s"] = fleet.ask_one(batched_copy_rate) / 1e3
                print_stations(head, fleet, arguments.replays)
                head["patch_us"] = fleet.patch_us(Case(8, 128, 7168))
                print(f"after the loss of a rank the slowest survivor patches its table in {head['patch_us']:.0f} us\n")
            for case in cases(arguments):
                result = fleet.measure(case, arguments.replays)
                result["floor_us"] = floor_us(case, rate)
                results.append(result)
                print(line(result), flush=True)
            if kind == "streams":
                head["torch_round_us"] = fleet.ask_one(torch_round_us, Case(8, 128, 7168))
    print(f"\nthe same by torch operators, one stream, 8 x 128 tokens of 7168: {head['torch_round_us']:.1f} us a round")
    for kind in ("processes", "streams"):
        print(summary(results, kind))
    if not arguments.no_files:
        name = arguments.results / "dispatch_combine-cuda"
        write_results(name, {**head, "results": results}, table(head, results), partial(plot, results))
    return 0


def table(head: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The printed results, as Markdown."""
    machine, rate = head["machine"], head["copy_gb_per_s_processes"]
    lines = [
        f"`{head['command']}`, commit {head['commit']}, {head['date']}, {machine['gpu']}, torch {machine['torch']}",
        "",
        "```",
        HEADER,
        *(line(result) for result in results),
        "```",
        "",
        *(summary(results, kind) + "  " for kind in ("processes", "streams")),
        f"the same by torch operators, one stream: {head['torch_round_us']:.1f} us a round  ",
        f"a batch of 288 expert tensors is copied at {head['batched_copy_gb_per_s'] / rate:.2f} of the copy rate of "
        f"{rate:.0f} GB/s  ",
    ]
    if "patch_us" in head:
        lines.append(
            f"the table without a lost rank, patched by its survivors: {head['patch_us']:.0f} us at the slowest  "
        )
    return "\n".join(lines) + "\n"


def print_stations(head: dict[str, Any], fleet: CudaFleet, replays: int) -> None:
    """Prints where a round spends its time and how fast weights are copied, and keeps both in ``head``."""
    ratio = head["batched_copy_gb_per_s"] / head["copy_gb_per_s_processes"]
    print(f"\na batch of 288 expert tensors is copied at {ratio:.2f} of the copy rate")
    head["stations_us"] = {}
    for wire in ("bf16", "fp8"):
        times = {name: last for name, (_, last) in fleet.stations(Case(8, 128, 7168, wire), replays).items()}
        head["stations_us"][wire] = times
        passed = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
        print(f"8 ranks, 128 tokens of 7168, {wire}: the last block of a round passes (us): {passed}")
    print()


def summary(results: list[dict[str, Any]], kind: str) -> str:
    chosen = [r for r in results if r["ranks_are"] == kind and (r["ranks"], r["tokens"], r["hidden"]) == (8, 128, 7168)]

    def best(wire: str, fixed: bool, field: str) -> float:
        return min(r[field] for r in chosen if r["wire"] == wire and r["fixed"] == fixed)

    elastic, fixed = best("bf16", False, "round_us"), best("bf16", True, "round_us")
    return (
        f"{kind}: dispatch {best('bf16', False, 'dispatch_us'):.1f} us (bar {BARS_US['dispatch']:.0f}), "
        f"combine {best('bf16', False, 'combine_us'):.1f} us (bar {BARS_US['combine']:.0f}), "
        f"fp8 dispatch {best('fp8', False, 'dispatch_us'):.1f} us (bar {BARS_US['fp8 dispatch']:.0f}); "
        f"a round {elastic:.1f} us, with membership compiled in {fixed:.1f} us ({100 * (elastic / fixed - 1):+.1f} %)"
    )


def plot(results: list[dict[str, Any]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for axis, hidden in zip(axes, (7168, 2048), strict=True):
        for ranks in (2, 4, 8):
            chosen = [
                r
                for r in results
                if (r["ranks_are"], r["ranks"], r["hidden"], r["wire"], r["fixed"])
                == ("processes", ranks, hidden, "bf16", False)
            ]
            by_tokens = sorted({r["tokens"]: r for r in chosen}.items())
            (drawn,) = axis.plot(
                [tokens for tokens, _ in by_tokens],
                [r["round_us"] for _, r in by_tokens],
                marker="o",
                label=f"{ranks} ranks",
            )
            axis.plot(
                [tokens for tokens, _ in by_tokens],
                [r["floor_us"] for _, r in by_tokens],
                linestyle=":",
                color=drawn.get_color(),
            )
        axis.set(xscale="log", yscale="log", xlabel="tokens per rank", title=f"hidden {hidden}, bf16, top-8 of 256")
        axis.grid(visible=True, which="both", alpha=0.2)
        axis.legend()
    axes[0].set_ylabel("µs per dispatch + combine (dotted: byte floor)")
    figure.suptitle("Ranks as processes that share one GPU, graph replays")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
