"""The figures of ``python -m bench.detection`` as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Samples = dict[str, list[dict[str, float]]]
CASES = {"rank": "a rank is killed", "host": "a host is killed", "cut": "a host is cut off"}


def row(links: str, case: str, values: Sequence[Mapping[str, float]]) -> str:
    """Medians, and the largest in parentheses, in milliseconds."""
    cells = [middle_and_most([value[name] for value in values]) for name in ("known", "view")]
    return f"| {CASES[case]} | {links} | {len(values)} | {' | '.join(cells)} |"


def middle_and_most(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({max(values):.0f})"


def markdown(head: Mapping[str, Any], timeout: float, linked: Samples, alone: Samples) -> str:
    machine = head["machine"]
    lines = [
        "# How soon a loss is known on other hosts",
        "",
        f"`{head['command']}`, commit {head['commit']},",
        f"{machine['cpu']}, {machine['cores']} cores for three hosts with two ranks each and a",
        f"node of etcd, all in network namespaces. Host timeout {timeout} s. Milliseconds from the SIGKILL or the cut to the",
        "slowest of the other two hosts, median (largest). *known*: the epoch is revoked there, so that no rank waits any",
        "more. *next view*: the view without the loss has been committed, and is there.",
        "",
        "| what | | times | known | next view |",
        "|---|---|---:|---:|---:|",
        *[row("with links", case, values) for case, values in linked.items()],
        *[row("through the store alone", case, values) for case, values in alone.items()],
    ]
    return "\n".join(lines) + "\n"
