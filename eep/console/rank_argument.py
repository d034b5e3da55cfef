"""Numbers of ranks and of seconds on a command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MOST_RANKS = 65536
"""Of any server; which ranks one has, it knows itself."""


def rank_number(text: str) -> int:
    """For argparse, which says in which argument it was."""
    if not (text.isascii() and text.isdecimal() and int(text) < MOST_RANKS):
        raise argparse.ArgumentTypeError(f"{text!r} is no rank: give a number from 0 to {MOST_RANKS - 1}")
    return int(text)


def rank_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_RANKS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: give one from 1 to {MOST_RANKS}")
    return int(text)


def seconds_up_to(most: float) -> Callable[[str], float]:
    def seconds(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not 0 < found <= most:  # nan, too
            raise argparse.ArgumentTypeError(f"{text!r}: give more than 0 seconds, and at most {most:g}")
        return found

    return seconds
