"""When a rank began each of its latest steps: written by the rank itself, in a file that the bench reads meanwhile.

What clients see of a step comes to them through the front end and their own threads, some milliseconds sooner or later; the
time between two beginnings in a rank is the step.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

_KEPT = 1 << 16
"""How many beginnings the file holds: those of some minutes under load."""
_SUFFIX = ".steps"


class StepLog:
    """In a rank. The first word of its file says how many steps have begun, the others when, the newest in place of the
    oldest."""

    def __init__(self, folder: Path) -> None:
        with (folder / f"{os.getpid()}{_SUFFIX}").open("w+b") as file:
            file.truncate(8 * (1 + _KEPT))
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")

    def note(self) -> None:
        """A step begins now."""
        words = self._words
        count = words[0]
        words[1 + count % _KEPT] = time.monotonic_ns()
        words[0] = count + 1


def read_steps(folder: Path) -> list[list[float]]:
    """Of every process that has a log in the folder: when its steps began (``time.monotonic``), in order."""
    found = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        words = memoryview(path.read_bytes()).cast("Q")
        found.append(sorted(moment / 1e9 for moment in words[1 : 1 + min(words[0], _KEPT)]))
    return found
