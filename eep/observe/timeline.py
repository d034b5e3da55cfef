"""A drill as a picture: tokens per second, active ranks, epochs and events over time, as PNG and as a single HTML page.

It takes plain numbers, so that drills and benchmarks can both draw. It needs matplotlib.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BIN = 0.25


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened, ``at`` seconds after the beginning."""

    at: float
    text: str
    kind: str = "event"
    """``fault`` (done on purpose), ``view`` or ``event``."""


@dataclass(frozen=True, slots=True)
class ActiveRanks:
    """From ``at`` seconds on, so many ranks are active, in that epoch."""

    at: float
    active: int
    epoch: int


def rates(moments: Sequence[float], end: float, width: float = _BIN) -> tuple[list[float], list[float]]:
    """Counts ``moments`` in bins of ``width`` seconds: the middle of each bin, and the rate per second in it."""
    bins = max(1, int(end / width) + 1)
    counts = [0] * bins
    for moment in moments:
        if 0 <= moment <= end:
            counts[min(bins - 1, int(moment / width))] += 1
    return [(i + 0.5) * width for i in range(bins)], [count / width for count in counts]


def draw_timeline(
    path: Path, title: str, tokens: Sequence[float], steps: Sequence[ActiveRanks], moments: Sequence[Moment], end: float
) -> list[Path]:
    """Writes ``path`` as .png and as .html; returns both names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(11, 5.5), gridspec_kw={"height_ratios": (3, 1)}, layout="constrained"
    )
    where, rate = rates(tokens, end)
    top.fill_between(where, rate, step="mid", color="#9ecae1")
    top.step(where, rate, where="mid", color="#3182bd", linewidth=1)
    top.set_ylabel("tokens per second")
    top.set_ylim(bottom=0)
    top.set_title(title, loc="left", fontsize=11)
    times = [*(step.at for step in steps), end]
    active = [*(step.active for step in steps), steps[-1].active if steps else 0]
    bottom.step(times, active, where="post", color="#31a354", linewidth=2)
    bottom.set_ylabel("active ranks")
    bottom.set_ylim(0, max([*active, 1]) + 0.6)
    bottom.set_xlabel("seconds")
    for step in steps:
        bottom.annotate(
            f"epoch {step.epoch}", (step.at, step.active), xytext=(2, 3), textcoords="offset points", fontsize=7
        )
    for moment in moments:
        if moment.kind == "fault":
            for axis in (top, bottom):
                axis.axvline(moment.at, color="#de2d26", linewidth=1, linestyle="--")
            top.annotate(
                moment.text,
                (moment.at, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -10),
                textcoords="offset points",
                fontsize=8,
                color="#de2d26",
            )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    pyplot.close(figure)
    image, page = path.with_suffix(".png"), path.with_suffix(".html")
    image.write_bytes(picture.getvalue())
    page.write_text(_page(title, picture.getvalue(), moments))
    return [image, page]


def _page(title: str, picture: bytes, moments: Sequence[Moment]) -> str:
    rows = "\n".join(
        f'<tr class="{html.escape(m.kind)}"><td>{m.at:.3f}</td><td>{html.escape(m.text)}</td></tr>'
        for m in sorted(moments, key=lambda moment: moment.at)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }}
img {{ max-width: 100% }}
td {{ padding: 0 1rem 0 0; font-variant-numeric: tabular-nums; vertical-align: top }}
.fault {{ color: #de2d26 }} .view {{ color: #31a354 }}
</style></head><body>
<h1>{html.escape(title)}</h1>
<img alt="tokens per second and active ranks over time" src="data:image/png;base64,{base64.b64encode(picture).decode()}">
<table><tbody>
{rows}
</tbody></table>
</body></html>
"""
