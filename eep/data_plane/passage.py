"""How the tokens of a step go through the data plane: by which buffer, and in how many portions.

A buffer has room for so many tokens of a rank. Where a rank has more, every layer of the step takes several rounds: all ranks
cut their tokens into as many portions, and exchange one portion after the other. Ranks with few tokens have small portions or
empty ones. A rank that disagreed about the number would wait for a round that never comes, so it comes from sizes that all
ranks have heard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Passage:
    """The same on every rank of a step. Passages have an order, so that ranks go through several in the same one."""

    buffer: int = 0
    """The number of the buffer."""
    portions: int = 1
    """Into how many parts each rank cuts its tokens, in each layer."""

    def cut(self, tokens: int) -> Iterator[slice]:
        """Which of so many tokens of this rank are in each portion. They are as even as can be."""
        for number in range(self.portions):
            yield slice(tokens * number // self.portions, tokens * (number + 1) // self.portions)


def count_portions(sizes: Iterable[int], room: int) -> int:
    """How many portions it takes. ``sizes``: how many tokens each rank has; ``room``: how many of a rank a buffer holds."""
    return max(1, -(-max(sizes, default=0) // room))
