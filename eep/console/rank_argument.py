"""The number of a rank on a command line."""

from __future__ import annotations

import argparse

MOST_RANKS = 65536
"""Of any server; which ranks one has, it knows itself."""


def rank_number(text: str) -> int:
    """For argparse, which says in which argument it was."""
    if not (text.isascii() and text.isdecimal() and int(text) < MOST_RANKS):
        raise argparse.ArgumentTypeError(f"{text!r} is no rank: give a number from 0 to {MOST_RANKS - 1}")
    return int(text)
