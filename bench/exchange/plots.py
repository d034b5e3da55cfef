"""Pictures of the results: the cost as tokens and as ranks grow. Lines are medians, bands reach to p90."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import matplotlib

matplotlib.use("Agg")  # files only: there may be no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from bench.exchange.measurement import DIRECTIONS, Result
from bench.exchange.rank_process import CONTENDERS

_STYLES = {"eep": ("#0b6e4f", "o", "-"), "gloo": ("#c1440e", "s", "-"), "memcpy": ("#7a7a7a", "^", "--")}


def plot_tokens(results: list[Result], subject: str, path: pathlib.Path) -> None:
    """Time against tokens per rank: a column for each number of ranks, a row for each direction."""
    counts = sorted({result.ranks for result in results})
    figure, grid = plt.subplots(
        len(DIRECTIONS),
        len(counts),
        figsize=(3.6 * len(counts) + 1, 7),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for column, ranks in enumerate(counts):
        cases = sorted((r for r in results if r.ranks == ranks), key=lambda r: r.tokens)
        for line, way in enumerate(DIRECTIONS):
            axes = grid[line][column]
            _draw(axes, cases, way, lambda result: result.tokens)
            axes.set_title(f"{way}, {ranks} ranks")
            axes.set_xlabel("tokens per rank")
    _finish(figure, grid, f"Time of one exchange against tokens\n{subject}", path)


def plot_ranks(results: list[Result], tokens: int, subject: str, path: pathlib.Path) -> None:
    """Time against the number of ranks at one number of tokens."""
    cases = sorted((r for r in results if r.tokens == tokens), key=lambda r: r.ranks)
    figure, grid = plt.subplots(1, len(DIRECTIONS), figsize=(9, 4.5), sharey=True, squeeze=False)
    for axes, way in zip(grid[0], DIRECTIONS, strict=True):
        _draw(axes, cases, way, lambda result: result.ranks)
        axes.set_title(way)
        axes.set_xlabel("ranks")
        axes.set_xticks([case.ranks for case in cases])
        axes.minorticks_off()
    _finish(figure, grid, f"Time of one exchange of {tokens} tokens per rank against ranks\n{subject}", path)


def _draw(axes: Axes, cases: list[Result], way: str, x_of: Callable[[Result], int]) -> None:
    x = [x_of(case) for case in cases]
    for name in CONTENDERS:
        colour, marker, line = _STYLES[name]
        timings = [case.timings[name][way] for case in cases]
        medians = [timing.median_us for timing in timings]
        axes.plot(x, medians, line, color=colour, marker=marker, markersize=4, label=name)
        axes.fill_between(x, medians, [timing.p90_us for timing in timings], color=colour, alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, which="major", alpha=0.3)


def _finish(figure: plt.Figure, grid: list[list[Axes]], title: str, path: pathlib.Path) -> None:
    for line in grid:
        line[0].set_ylabel("µs, first rank in to last rank out")
    grid[0][0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
