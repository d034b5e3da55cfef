"""The arguments that every benchmark takes, so that they mean the same everywhere."""

from __future__ import annotations

import argparse
import pathlib

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"


def make_parser(module: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """A parser for ``python -m module`` that shows both texts as they are written."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_files(parser: argparse.ArgumentParser) -> None:
    """``--results`` and ``--no-files``: where the files go, if anywhere."""
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        default=RESULTS,
        metavar="FOLDER",
        help="folder for the files (default: bench/results)",
    )
    parser.add_argument("--no-files", action="store_true", help="print the results and write no files")


def add_quick(parser: argparse.ArgumentParser) -> None:
    """``--quick``; the benchmark chooses the cases."""
    parser.add_argument("--quick", action="store_true", help="a smoke run: few cases, little time each, no files")
