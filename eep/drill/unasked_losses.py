"""Ranks that a drill lost without having done anything to them. Decisions only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

from eep.view import View


def find_unasked(views: Iterable[View], faulted: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranks and lives that were in a view and not in the next, in this order. ``faulted``: those that were killed or
    stopped."""
    lives = ({(rank, view.incarnations[rank]) for rank in view.active} for view in views)
    lost = (each for before, after in pairwise(lives) for each in sorted(before - after))
    return [each for each in lost if each not in faulted]
