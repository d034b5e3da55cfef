"""How a copy of contexts lies in memory: a header, an index, and pages.

A page has all that the layers of a cache have of 16 tokens of a request that follow each other: of each layer in turn, the
rows of these tokens. So a page is one piece, which can be verified and sent by itself, and nothing in it is an address: the
copy may lie on any host.

Rows of a size are a whole number of rows apart from page to page. So whatever copies rows by number can fill pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

PAGE = 16
"""Tokens of a page. Only whole pages are copied: to compute 15 tokens takes as long as to compute one, as a rule."""


@dataclass(frozen=True)
class PageLayout:
    """``row_bytes``: of a token, in each layer."""

    row_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.row_bytes or min(self.row_bytes) < 1:
            raise ValueError("a cache has at least one layer, and a row of each for every token")

    @cached_property
    def page_bytes(self) -> int:
        step = math.lcm(*self.row_bytes)
        return -(-PAGE * sum(self.row_bytes) // step) * step

    def start(self, layer: int) -> int:
        """Where in a page the rows of this layer begin."""
        return PAGE * sum(self.row_bytes[:layer])

    def layers_by_size(self) -> dict[int, list[int]]:
        """Which layers have rows of each size."""
        return {size: [n for n, each in enumerate(self.row_bytes) if each == size] for size in set(self.row_bytes)}

    def rows(self, size: int, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of all rows of these pages, where rows of ``size`` bytes are counted from the first one of a layer."""
        return (pages[:, None] * (self.page_bytes // size) + np.arange(PAGE)).ravel()
