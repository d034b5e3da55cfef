"""The results of a run as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from bench.common.drilled_server import origin_lines
from bench.takeover.phases import EDGES, SPARES, STORM

TIMES = {
    "noticed": "the view without the rank is committed",
    "running": "all survivors run in it",
    "rejoined": "the rank is back, and all run",
}
_HELD = {
    "processes": "processes",
    "descriptors": "open descriptors",
    "host_mib": "host memory (PSS), MiB",
    "mappings": "pieces of address space",
    "shared_mib": "files in shared memory, MiB",
    "device_mib": "device memory, MiB",
}


def page(head: dict[str, Any], told: dict[str, Any]) -> str:
    setting, requests = head["setting"], head["requests"]
    kills, phases = told["kills"], told["phases"]
    return "\n".join(
        [
            f"# Ranks that come back as spares, {setting['device']}",
            "",
            *origin_lines(head),
            f"Four ranks, {setting['spares']} spares, {setting['clients']} clients that stream answers of up to "
            f"{setting['tokens']} tokens.{_slots(setting)}",
            "",
            f"{requests['answered']} requests, {requests['failed']} failed, {requests['wrong']} with a wrong token; "
            f"{len(kills) + sum(each['kills'] for each in phases if each['kind'] == STORM)} kills.",
            "",
            f"| milliseconds from SIGKILL until, of {len(kills)} kills with all spares ready | p50 | p99 | most |",
            "|---|---:|---:|---:|",
            *(f"| {text} | {_cells([each[name] * 1e3 for each in kills])} |" for name, text in TIMES.items()),
            "",
            *_storms(phases, setting["every"]),
            *_holdings(told["held"]),
        ]
    )


def _slots(setting: dict[str, Any]) -> str:
    more = setting.get("redundant_experts")
    return "" if more is None else f" {more} slots more than there are experts in a layer."


def _storms(phases: Sequence[dict[str, Any]], every: float) -> list[str]:
    if not phases:
        return []
    pairs = list(zip(phases[::2], phases[1::2], strict=True))
    ratios = [storm["tokens_per_second"] / calm["tokens_per_second"] for calm, storm in pairs]
    lines = [
        f"| tokens per second | calm | a kill every {every:g} s | |",
        "|---|---:|---:|---:|",
        *(
            f"| {calm['seconds']:.0f} s, then {storm['kills']} kills{_of(storm)} in {storm['seconds']:.0f} s "
            f"| {calm['tokens_per_second']:.0f} | {storm['tokens_per_second']:.0f} | {ratio:.3f} |"
            for (calm, storm), ratio in zip(pairs, ratios, strict=True)
        ),
        "",
    ]
    of_ranks = [ratio for (_, storm), ratio in zip(pairs, ratios, strict=True) if storm["kind"] == STORM]
    if of_ranks:
        lines += [
            f"A kill every {every:g} s leaves {100 * statistics.fmean(of_ranks):.1f} % of the tokens per second.",
            "",
        ]
    lines += [
        "How it goes after a kill: of the tokens per second in the calm before, the mean of all kills.",
        "",
        f"| seconds since | {_joined(f'{since:g} to {until:g}' for since, until in pairwise(EDGES))} |",
        f"|---|{'---:|' * (len(EDGES) - 1)}",
        *(
            f"| {storm['kills']} kills{_of(storm)} "
            f"| {_joined(round(rate / calm['tokens_per_second'], 2) for rate in storm['after_kills'])} |"
            for calm, storm in pairs
        ),
        *(
            f"| steps of the ranks that stay, {storm['kills']} kills "
            f"| {_joined(round(rate / calm['steps_per_second'], 2) for rate in storm['steps_after_kills'])} |"
            for calm, storm in pairs
            if storm["steps_after_kills"] and calm["steps_per_second"]
        ),
        "",
    ]
    return lines


def _of(storm: dict[str, Any]) -> str:
    return " of spares" if storm["kind"] == SPARES else ""


def _holdings(held: Sequence[dict[str, Any]]) -> list[str]:
    return [
        "| all processes of the server together, with all spares ready, after so many kills, of spares too | "
        f"{_joined(each['kills'] for each in held)} |",
        f"|---|{'---:|' * len(held)}",
        *(
            f"| {text} | {_joined(each[name] for each in held)} |"
            for name, text in _HELD.items()
            if held[0][name] is not None
        ),
        "",
    ]


def _joined(cells: Iterable[object]) -> str:
    return " | ".join(map(str, cells))


def _cells(values: Sequence[float]) -> str:
    """The p99 of so few values is interpolated between the largest two."""
    if len(values) < 2:
        return " | ".join([f"{values[0]:.0f}"] * 3)
    centiles = statistics.quantiles(values, n=100, method="inclusive")
    return f"{centiles[49]:.0f} | {centiles[98]:.0f} | {max(values):.0f}"
