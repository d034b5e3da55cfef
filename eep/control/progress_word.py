"""The progress word of a rank: it changes for as long as the rank gets on with its work.

It lies in the page of the rank's pulse, which the supervisor maps. The rank writes it at every boundary, and within a step
wherever it has got on. While the rank has no work before the next view, the word says so: then it need not change. While the
rank runs code of its own and waits for no peer and no device, the word says that, too: then the rank has no reason to sleep,
and unless it says that it may take long, none to compute for long. A rank whose device may make it wait where nothing says so
says that as well: such a wait looks as if it computed.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

OFFSET = 128
"""Behind the lock that lies at the beginning of the page."""
_THREAD = OFFSET + 8
_RESTS, _RUNS, _LONG, _UNSEEN = 1, 2, 4, 8
_STEP = 16


class ProgressWord:
    """The word in a page that is mapped here: the rank writes it, the supervisor reads it."""

    def __init__(self, page: mmap.mmap) -> None:
        self._word = ctypes.c_uint64.from_buffer(page, OFFSET)
        self._thread = ctypes.c_uint64.from_buffer(page, _THREAD)
        self._count = 0
        self.may_take_long = True
        """Whether what the writer runs from now on may honestly compute for long."""
        self.may_wait_unseen = False
        """Whether it may meanwhile wait for its device, and through that for peers."""

    def own(self) -> None:
        """This thread is the one whose work the word is about."""
        self._thread.value = threading.get_native_id()

    def advance(self) -> None:
        """Say that the rank has got on. Every step says so several times."""
        self._count += _STEP
        self._word.value = self._count

    def run(self) -> None:
        """Say that the rank has got on, and waits for no peer and no device until it says anything else."""
        self._count += _STEP
        self._word.value = self._count | _RUNS | _LONG * self.may_take_long | _UNSEEN * self.may_wait_unseen

    def rest(self) -> None:
        """Say that the rank has no work, until it says that it has got on."""
        self._word.value = self._count | _RESTS

    def read(self) -> int | None:
        """What the word says; None while the rank rests, or has not begun."""
        value = self._word.value
        return None if value == 0 or value & _RESTS else value

    def read_run(self) -> tuple[int, int] | None:
        """The word and the thread that it is about, while that waits for no peer and no device; None otherwise."""
        value, thread = self._word.value, self._thread.value
        return (value, thread) if value & _RUNS and not value & _RESTS and thread else None


def may_take_long(word: int) -> bool:
    """Whether a rank that runs has said so."""
    return bool(word & _LONG)


def may_wait_unseen(word: int) -> bool:
    """Whether a rank that runs has said so."""
    return bool(word & _UNSEEN)
