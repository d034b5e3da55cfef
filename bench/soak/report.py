"""What a soak has shown, as a page."""

from __future__ import annotations

import statistics
from typing import Any


def page(results: dict[str, Any]) -> str:
    machine, times = results["machine"], [each["seconds"] for each in results["rounds"]]
    quarter = max(1, len(times) // 4)
    judged = f"not passed: {'; '.join(results['complaints'])}" if results["complaints"] else "passed"
    return (
        "# A server that loses ranks a thousand times\n\n"
        f"`{results['command']}` at {results['commit']}, {results['date']}.\n"
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, load average {machine['load_average']}.\n\n"
        f"**{judged}**: {results['deaths']} deaths of ranks in {len(times)} rounds and {results['seconds']:.0f} s,\n"
        f"{results['requests']} requests, {len(results['failed'])} failed, {results['wrong']} with a wrong token, "
        f"{len(results['left_over'])} things left over.\n"
        f"Until all ranks were back: {statistics.median(times[:quarter]):.1f} s in the first quarter of the rounds, "
        f"{statistics.median(times[-quarter:]):.1f} s in the last.\n\n"
        "Three of four ranks are killed at once with SIGKILL, again and again, under a light load. *First* and *last*\n"
        "are the medians of the first and the last quarter of the samples, after a warm-up of a tenth. *May grow* is\n"
        "the allowance: that share, or that number if it is more. Figures of ranks are sums over all four.\n\n"
        f"{table(results)}\n"
    )


def complaints(results: dict[str, Any]) -> list[str]:
    """Why a soak has not passed."""
    grown = [each["name"] for each in results["verdicts"] if not each["is_flat"]]
    told = [
        (grown, f"{', '.join(grown)} grew"),
        (not results["requests"], "no request was answered"),
        (results["failed"], "requests failed"),
        (results["wrong"], "tokens were wrong"),
        (results["left_over"], f"left over: {', '.join(results['left_over'])}"),
        (results["deaths"] < results["wanted"], f"only {results['deaths']} of {results['wanted']} deaths in the time"),
    ]
    return [text for is_so, text in told if is_so]


def table(results: dict[str, Any]) -> str:
    lines = ["| figure | first | last | most | may grow | |", "|---|---:|---:|---:|---:|---|"]
    for each in results["verdicts"]:
        shown = " | ".join(_number(each[name]) for name in ("first", "last", "most"))
        lines.append(
            f"| {each['name']} | {shown} | {_allowance(each['allowance'])} | {'flat' if each['is_flat'] else 'GREW'} |"
        )
    return "\n".join(lines)


def _allowance(allowance: dict[str, Any]) -> str:
    if allowance["limit"] is not None:
        return f"to {_number(allowance['limit'])}"
    parts = [f"{allowance['share']:.0%}"] if allowance["share"] else []
    return " or ".join([*parts, *([_number(allowance["plus"])] if allowance["plus"] else [])]) or "0"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
