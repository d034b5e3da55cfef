"""The steps that wrong tokens came from, found in what the ranks wrote down (``EEP_STEP_RECORD``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RecordedStep:
    at: float
    """``time.monotonic`` of the rank, which is that of the host."""
    rank: int
    kind: str
    graph: bool
    rows: tuple[tuple[str, int], ...]
    """Of each row the request, and how many tokens it had before."""


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step with wrong tokens."""

    at: float
    rank: int
    kind: str
    graph: bool
    rows: int
    wrong_rows: tuple[int, ...]
    rows_of_last_graph: int | None
    """How many rows the newest step before it had that ran as a graph."""
    kinds_before: tuple[str, ...]
    """The kinds of the steps just before it, the newest last: a number of rows, and ``g`` for a graph."""


def read_steps(folder: Path) -> list[list[RecordedStep]]:
    """The steps of each process that wrote any, in order."""
    found = []
    for path in sorted(folder.glob("*")):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        rows = [tuple((str(name), int(count)) for name, count in line.pop("rows")) for line in lines]
        found.append([RecordedStep(rows=each, **line) for each, line in zip(rows, lines, strict=True)])
    return found


def find_bad_steps(steps: Iterable[Sequence[RecordedStep]], wrong: Iterable[tuple[str, int]]) -> list[BadStep]:
    """``wrong``: requests, and the place of the first wrong token of each."""
    looked_for = set(wrong)
    found = []
    for of_process in steps:
        for number, step in enumerate(of_process):
            rows = tuple(row for row, each in enumerate(step.rows) if each in looked_for)
            if rows:
                found.append(_bad_step(of_process, number, rows))
    return sorted(found, key=lambda step: step.at)


def _bad_step(steps: Sequence[RecordedStep], number: int, rows: tuple[int, ...], shown: int = 8) -> BadStep:
    step, before = steps[number], steps[:number]
    graphs = (len(each.rows) for each in reversed(before) if each.graph)
    return BadStep(
        at=step.at,
        rank=step.rank,
        kind=step.kind,
        graph=step.graph,
        rows=len(step.rows),
        wrong_rows=rows,
        rows_of_last_graph=next(graphs, None),
        kinds_before=tuple(f"{each.kind} {len(each.rows)}{'g' if each.graph else ''}" for each in before[-shown:]),
    )
