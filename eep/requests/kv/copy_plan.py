"""What to copy next of the contexts of a rank, and where to, and what is given up for it.

The plan knows rows of the journal and numbers of pages, and nothing else. A row has its pages from the first token of its
request on, without a gap. When the *turn* of a row changes, the request is no longer the same, and its pages are free again.

If there is not room for all, those with the least to lose go without, or with less. Requests of about the same size, up to
a factor of two, do not take pages from each other: which of them is the longer one changes all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eep.requests.kv.copy_layout import PAGE

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Moves:
    """First the pages of ``given_up`` are nobody's any more. Then, for each i, page ``numbers[i]`` of the request that has
    row ``rows[i]`` is copied to ``pages[i]``."""

    given_up: Numbers
    rows: Numbers
    numbers: Numbers
    pages: Numbers


_NONE: Numbers = np.empty(0, np.int64)
_NOTHING = Moves(_NONE, _NONE, _NONE, _NONE)


class CopyPlan:
    def __init__(self, rows: int, context: int, pages: int) -> None:
        """``context``: the most tokens of a request."""
        self._turns = np.zeros(rows, np.int64)
        self._covered = np.zeros(rows, np.int64)
        """How many pages of each row are copied."""
        self._page_of = np.zeros((rows, context // PAGE), np.int32)
        self._free: Numbers = np.arange(pages)[::-1].copy()
        """A stack. The first ``_left`` of them are free."""
        self._left = pages
        self.behind = 0
        """Tokens, in whole pages, that could have been copied by now, when :meth:`next` was asked last."""

    @property
    def covered(self) -> int:
        """Tokens that are copied."""
        return PAGE * int(self._covered.sum())

    def next(self, turns: Numbers, tokens: Numbers, most: int) -> Moves:
        """``most``: of pages to copy. The caller does it, and says with :meth:`settle` what has become of it."""
        whole = np.minimum(tokens // PAGE, self._page_of.shape[1])
        if np.array_equal(whole, self._covered) and np.array_equal(turns, self._turns):
            self.behind = 0
            return _NOTHING
        ended = np.flatnonzero((turns != self._turns) & (self._covered > 0))
        given_up = [self._shrink(ended, np.zeros_like(ended))]
        self._turns[:] = turns
        allowed = self._allowed(whole)
        larger = np.flatnonzero(self._covered > allowed)
        given_up.append(self._shrink(larger, allowed[larger]))
        self.behind = PAGE * int((whole - self._covered).sum())
        missing = allowed - self._covered
        rows = np.flatnonzero(missing)
        rows = rows[np.argsort(-whole[rows], kind="stable")]
        counts = np.clip(most - (np.cumsum(missing[rows]) - missing[rows]), 0, missing[rows])
        numbers = _runs(self._covered[rows], counts)
        self._left -= len(numbers)
        pages = self._free[self._left : self._left + len(numbers)][::-1].copy()
        return Moves(np.concatenate(given_up), np.repeat(rows, counts), numbers, pages)

    def settle(self, moves: Moves, copied: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which of the pages count: those that were ``copied``, and of each row all or none. The others are free again."""
        copied = ~np.isin(moves.rows, moves.rows[~copied])
        rows, numbers, pages = moves.rows[copied], moves.numbers[copied], moves.pages[copied]
        self._page_of[rows, numbers] = pages
        np.add.at(self._covered, rows, 1)
        self.behind -= PAGE * len(pages)
        self._give_back(moves.pages[~copied])
        return copied

    def _allowed(self, whole: Numbers) -> Numbers:
        """How many pages each row may have."""
        if int(whole.sum()) <= len(self._free):
            return whole
        size = np.frexp(whole)[1]
        order = np.lexsort((-self._covered, -size))
        wanted = whole[order]
        allowed = np.empty_like(whole)
        allowed[order] = np.clip(len(self._free) - (np.cumsum(wanted) - wanted), 0, wanted)
        return allowed

    def _shrink(self, rows: Numbers, keep: Numbers) -> Numbers:
        """The pages that these rows lose."""
        counts = self._covered[rows] - keep
        pages: Numbers = self._page_of[np.repeat(rows, counts), _runs(keep, counts)].astype(np.int64)
        self._covered[rows] = keep
        self._give_back(pages)
        return pages

    def _give_back(self, pages: Numbers) -> None:
        self._free[self._left : self._left + len(pages)] = pages
        self._left += len(pages)


def _runs(first: Numbers, counts: Numbers) -> Numbers:
    """One run of numbers after the other: ``counts[i]`` of them from ``first[i]`` on."""
    before = np.cumsum(counts) - counts
    numbers: Numbers = np.arange(int(counts.sum())) + np.repeat(first - before, counts)
    return numbers
