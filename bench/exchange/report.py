"""The results on the CPU: a table that grows row by row, and a JSON file."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from bench.exchange.measurement import DIRECTIONS, Result
from bench.exchange.rank_process import CONTENDERS

_TIMES = f"{'eep':>9} {'p90':>9} {'gloo':>9} {'memcpy':>9} {'gloo/eep':>9}"


def header() -> str:
    """The head of the table; :func:`row` fits under it."""
    width = len(_TIMES)
    return (
        f"{'':>22} | {'dispatch, µs':^{width}} | {'combine, µs':^{width}}\n"
        f"{'ranks':>5} {'tokens':>6} {'KiB/rank':>9} | {_TIMES} | {_TIMES}\n"
        f"{'-' * 22}-+-{'-' * width}-+-{'-' * width}"
    )


def row(result: Result) -> str:
    """One case as a line of the table. Times are medians; gloo/eep is how many times longer gloo takes."""
    cells = []
    for way in DIRECTIONS:
        eep = result.timings["eep"][way]
        gloo, memcpy = (result.median(name, way) for name in ("gloo", "memcpy"))
        cells.append(f"{eep.median_us:9.1f} {eep.p90_us:9.1f} {gloo:9.1f} {memcpy:9.1f} {gloo / eep.median_us:8.2f}x")
    kib = result.bytes_per_rank["dispatch"] / 1024
    return f"{result.ranks:>5} {result.tokens:>6} {kib:9.1f} | {cells[0]} | {cells[1]}"


def summary(result: Result) -> str:
    """The headline case in words."""
    lines = [f"{result.ranks} ranks, {result.tokens} tokens each, dispatch + combine:"]
    for name in CONTENDERS:
        ratio = result.total(name) / result.total("eep")
        against = "" if name == "eep" else f"   {ratio:5.2f} x the time of eep"
        lines.append(f"  {name:<7} {result.total(name):10.1f} µs{against}")
    return "\n".join(lines)


def write_json(path: pathlib.Path, head: dict[str, Any], results: list[Result], headline: Result | None) -> None:
    """Writes all results, with where they come from."""
    document = {
        **head,
        "headline": None if headline is None else headline.as_json(),
        "cases": [result.as_json() for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
