"""When something happened in a process of a server, written by that process in a file that the bench reads meanwhile.

What clients see of a step, for example, comes to them through the front end and their own threads, some milliseconds sooner
or later; the time between two beginnings in a rank is the step.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

_KEPT = 1 << 16
"""How many moments the file holds: of steps, those of some minutes under load."""


class MomentLog:
    """In a process of the server. The first word of its file says how many moments were noted; then come two words of each,
    when it was and a number, the newest in place of the oldest."""

    def __init__(self, folder: Path, what: str) -> None:
        with (folder / f"{os.getpid()}.{what}").open("w+b") as file:
            file.truncate(8 * (1 + 2 * _KEPT))
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")

    def note(self, number: int = 0) -> None:
        """It happens now."""
        words = self._words
        count = words[0]
        place = 1 + 2 * (count % _KEPT)
        words[place], words[place + 1] = time.monotonic_ns(), number
        words[0] = count + 1


def read_moments(folder: Path, what: str) -> list[list[tuple[float, int]]]:
    """Of every process that has such a log in the folder: moments (``time.monotonic``) and their numbers, in order."""
    return list(read_moments_by_process(folder, what).values())


def read_moments_by_process(folder: Path, what: str) -> dict[int, list[tuple[float, int]]]:
    """The same, by the numbers of the processes."""
    found = {}
    for path in sorted(folder.glob(f"*.{what}")):
        words = memoryview(path.read_bytes()).cast("Q")
        kept = min(words[0], _KEPT)
        found[int(path.stem)] = sorted((words[1 + 2 * each] / 1e9, words[2 + 2 * each]) for each in range(kept))
    return found
