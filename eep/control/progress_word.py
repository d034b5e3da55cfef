"""The progress word of a rank: it changes for as long as the rank gets on with its work.

It lies in the page of the rank's pulse, which the supervisor maps. The rank writes it at every boundary, and within a step
wherever it has got on. While the rank has no work before the next view, the word says so: then it need not change.
"""

from __future__ import annotations

import ctypes
import mmap

OFFSET = 128
"""Behind the lock that lies at the beginning of the page."""


class ProgressWord:
    """The word in a page that is mapped here: the rank writes it, the supervisor reads it."""

    def __init__(self, page: mmap.mmap) -> None:
        self._word = ctypes.c_uint64.from_buffer(page, OFFSET)
        self._count = 0

    def advance(self) -> None:
        """Say that the rank has got on. Every step says so several times."""
        self._count += 1
        self._word.value = self._count << 1

    def rest(self) -> None:
        """Say that the rank has no work, until it says that it has got on."""
        self._word.value = self._count << 1 | 1

    def read(self) -> int | None:
        """What the word says; None while the rank rests, or has not begun."""
        value = self._word.value
        return None if value == 0 or value & 1 else value
