"""Results of the benchmark of collectives for people: a table that grows row by row, a summary, and a picture."""

from __future__ import annotations

import pathlib
from dataclasses import asdict, dataclass
from typing import Any

from bench.collectives.rank import COLLECTIVES, CONTENDERS

_STYLES = {"eep": ("#0b6e4f", "o"), "gloo": ("#c1440e", "s")}


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call."""

    median_us: float
    p99_us: float
    calls: int


@dataclass(frozen=True, slots=True)
class Result:
    """One case: ``timings[contender]``."""

    collective: str
    ranks: int
    size: int
    timings: dict[str, Timing]

    @property
    def ratio(self) -> float:
        """How many times longer gloo takes."""
        return self.timings["gloo"].median_us / self.timings["eep"].median_us

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "times_as_long_as_eep": round(self.ratio, 3)}


def header() -> str:
    """The head of the table; :func:`row` fits under it."""
    times = f"{'median, µs':>12} {'p99, µs':>12}"
    return (
        f"{'':>33} | {'eep':^25} | {'gloo':^25} |\n"
        f"{'collective':<14} {'ranks':>5} {'size':>12} | {times} | {times} | {'gloo/eep':>9}\n"
        f"{'-' * 33}-+-{'-' * 25}-+-{'-' * 25}-+-{'-' * 9}"
    )


def row(result: Result) -> str:
    """One case as a line of the table."""
    cells = [
        f"{timing.median_us:12.1f} {timing.p99_us:12.1f}" for timing in map(result.timings.get, CONTENDERS) if timing
    ]
    name = f"{result.collective:<14} {result.ranks:>5} {size_text(result.size):>12}"
    return f"{name} | {' | '.join(cells)} | {result.ratio:8.2f}x"


def summary(results: list[Result]) -> str:
    """In how many cases eep is the faster one, and where it is not."""
    slower = [result for result in results if result.ratio < 1]
    lines = [f"eep is faster than gloo in {len(results) - len(slower)} of {len(results)} cases"]
    lines += [f"  not: {row(result)}" for result in slower]
    small = sorted(result.ratio for result in results if result.size <= 4096)
    if small:
        lines.append(f"up to 4 KiB, gloo takes {small[0]:.1f} to {small[-1]:.1f} times as long")
    return "\n".join(lines)


def size_text(size: int) -> str:
    for unit, of in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= of:
            return f"{size // of} {unit}"
    return f"{size} B"


def plot(results: list[Result], subject: str, path: pathlib.Path) -> None:
    """Time against size: a row for each collective, a column for each number of ranks. Bands reach to p99."""
    import matplotlib

    matplotlib.use("Agg")  # files only: there may be no display
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    counts = sorted({result.ranks for result in results})
    collectives = [name for name in COLLECTIVES if any(result.collective == name for result in results)]
    figure, grid = plt.subplots(
        len(collectives),
        len(counts),
        figsize=(3.6 * len(counts) + 1, 2.8 * len(collectives) + 1),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for line, collective in enumerate(collectives):
        for column, ranks in enumerate(counts):
            axes = grid[line][column]
            cases = [r for r in results if (r.collective, r.ranks) == (collective, ranks)]
            sizes = [case.size for case in cases]
            for name in CONTENDERS:
                colour, marker = _STYLES[name]
                medians = [case.timings[name].median_us for case in cases]
                p99s = [case.timings[name].p99_us for case in cases]
                axes.plot(sizes, medians, color=colour, marker=marker, markersize=4, label=name)
                axes.fill_between(sizes, medians, p99s, color=colour, alpha=0.12, linewidth=0)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(int(value))))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.tick_params(axis="x", rotation=45)
            axes.grid(True, which="major", alpha=0.3)
            axes.set_title(f"{collective}, {ranks} ranks")
        grid[line][0].set_ylabel("µs per call")
    grid[0][0].legend()
    figure.suptitle(f"Time of a collective against the size of its larger tensor\n{subject}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
