"""The results of a run as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.common.drilled_server import origin_lines

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
            f"{setting['tokens']} tokens.",
            "",
            f"{requests['answered']} requests, {requests['failed']} failed, {requests['wrong']} with a wrong token; "
            f"{len(kills) + sum(each['kills'] for each in phases)} kills.",
            "",
            f"| milliseconds from SIGKILL until, of {len(kills)} kills with all spares ready | p50 | p99 | most |",
            "|---|---:|---:|---:|",
            *(f"| {text} | {_cells([each[name] * 1e3 for each in kills])} |" for name, text in TIMES.items()),
            "",
            *_storms(phases, setting["every"]),
            "| all processes of the server together | before the first kill | after the last, with all spares ready |",
            "|---|---:|---:|",
            *(
                f"| {text} | {told['before'][name]} | {told['after'][name]} |"
                for name, text in _HELD.items()
                if told["before"][name] is not None
            ),
            "",
        ]
    )


def _storms(phases: Sequence[dict[str, Any]], every: float) -> list[str]:
    if not phases:
        return []
    pairs = list(zip(phases[::2], phases[1::2], strict=True))
    ratios = [storm["tokens_per_second"] / calm["tokens_per_second"] for calm, storm in pairs]
    return [
        f"| tokens per second | calm | a kill every {every:g} s | |",
        "|---|---:|---:|---:|",
        *(
            f"| {calm['seconds']:.0f} s, then {storm['kills']} kills in {storm['seconds']:.0f} s "
            f"| {calm['tokens_per_second']:.0f} | {storm['tokens_per_second']:.0f} | {ratio:.3f} |"
            for (calm, storm), ratio in zip(pairs, ratios, strict=True)
        ),
        "",
        f"A kill every {every:g} s leaves {100 * statistics.fmean(ratios):.1f} % of the tokens per second.",
        "",
    ]


def _cells(values: Sequence[float]) -> str:
    """The p99 of so few values is interpolated between the largest two."""
    if len(values) < 2:
        return " | ".join([f"{values[0]:.0f}"] * 3)
    centiles = statistics.quantiles(values, n=100, method="inclusive")
    return f"{centiles[49]:.0f} | {centiles[98]:.0f} | {max(values):.0f}"
