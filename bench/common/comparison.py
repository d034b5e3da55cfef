"""What phases and turns with something on and off come to, for people and for programs. ``names`` are those of on and off."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.common.phases import FIGURES, Phase, of_kind, ratios
from bench.common.turns import OF_TURNS, Block, compared

Names = tuple[str, str]


def sum_up_phases(phases: Sequence[Phase], names: Names) -> dict[str, Any]:
    """Each figure with it on, with it off, and the ratio of the two in each pair of phases."""
    on, off = names
    told: dict[str, Any] = {}
    for figure in FIGURES:
        with_it, without = of_kind(phases, figure, on=True), of_kind(phases, figure, on=False)
        found = ratios(phases, figure)
        quartiles = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        told[figure] = {
            on: round(statistics.median(with_it), 3),
            off: round(statistics.median(without), 3),
            f"{on}_over_{off}": round(statistics.median(found), 4),
            "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
            "of_all_phases": round(statistics.fmean(with_it) / statistics.fmean(without), 4),
        }
    return {**told, "pairs": len(phases) // 2, "phases": [_as_dict(phase, names) for phase in phases]}


def _as_dict(phase: Phase, names: Names) -> dict[str, Any]:
    return {names[0]: phase.on, **{figure: getattr(phase, figure) for figure in FIGURES}}


def sum_up_turns(blocks: Sequence[Block], names: Names) -> dict[str, Any]:
    """Steps with it on against those with it off, all of them and without stalls, and the share of stalls in the time."""
    on, off = names
    usual = compared([block.without_stalls for block in blocks])
    off_ms = statistics.median(block.off_ms for block in blocks)
    return {
        "of_all_steps": asdict(compared([block.ratio for block in blocks])),
        "without_stalls": asdict(usual),
        f"{off}_step_ms": round(off_ms, 4),
        "us_more_per_step": [
            round(1000 * off_ms * (1 / ratio - 1), 1) for ratio in (usual.mean, usual.most, usual.least)
        ],
        f"{on}_stalled": round(statistics.fmean(block.on_stalled for block in blocks), 4),
        f"{off}_stalled": round(statistics.fmean(block.off_stalled for block in blocks), 4),
        "of_each_block": [{name: round(value, 4) for name, value in asdict(block).items()} for block in blocks],
    }


def phases_table(level: dict[str, Any], names: Names, headings: Names) -> list[str]:
    """As Markdown. ``headings``: of the columns of on and off."""
    on, off = names
    return [
        f"| | {headings[0]} | {headings[1]} | {on}/{off} of a pair: median, quartiles | of the means of all phases |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {text} | {level[figure][on]:.{digits}f} | {level[figure][off]:.{digits}f} | "
            f"{level[figure][f'{on}_over_{off}']:.3f}, {level[figure]['quartiles'][0]:.3f} to "
            f"{level[figure]['quartiles'][1]:.3f} | {level[figure]['of_all_phases']:.3f} |"
            for figure, (text, digits) in FIGURES.items()
        ),
    ]


def turns_table(turns: dict[str, Any], names: Names) -> list[str]:
    """As Markdown, and a sentence about a single step."""
    more, least, most = map(round, turns["us_more_per_step"])
    on, off = names
    return [
        f"| steps per second, {on}/{off} | mean | 95 % interval | median |",
        "|---|---:|---:|---:|",
        *(f"| {text} | {_as_cells(turns[name])} |" for name, text in OF_TURNS.items()),
        "",
        f"A step that is no stall takes {turns[f'{off}_step_ms']:.2f} ms ({off}), and {more} us more ({on}; 95 % interval "
        f"{least} to {most}). Stalls took {100 * turns[f'{on}_stalled']:.1f} % of the time ({on}) and "
        f"{100 * turns[f'{off}_stalled']:.1f} % ({off}).",
    ]


def _as_cells(told: dict[str, float]) -> str:
    return f"{told['mean']:.4f} | {told['least']:.4f} to {told['most']:.4f} | {told['median']:.4f}"
