"""The files of a benchmark: its figures as JSON, a page that shows them, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.common.arguments import RESULTS


def write_results(
    name: Path, figures: Mapping[str, Any], page: str, plot: Callable[[Path], object] | None = None
) -> None:
    """Writes ``name``, which has no suffix, as .json and .md, and as .png what ``plot`` draws. Prints what it wrote."""
    name.parent.mkdir(parents=True, exist_ok=True)
    written = [name.with_suffix(".json"), name.with_suffix(".md")]
    written[0].write_text(json.dumps(figures, indent=1) + "\n")
    written[1].write_text(page)
    if plot is not None:
        written.append(name.with_suffix(".png"))
        plot(written[-1])
    say_written(written)


def say_written(paths: list[Path]) -> None:
    """Prints the names of the files, short where they are in this checkout."""
    root = RESULTS.parents[1]
    for path in paths:
        absolute = path.resolve()
        print(f"wrote {absolute.relative_to(root) if absolute.is_relative_to(root) else path}")
