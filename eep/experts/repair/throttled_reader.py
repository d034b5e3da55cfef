"""A source that takes longer than it need: for drills of what a slow disk does to a repair."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from eep.experts.repair.reader import Reader, Want

DISK_MS = "EEP_DISK_MS"
"""How many milliseconds each expert takes that is read from disk, beyond what it takes anyway."""


class ThrottledReader:
    def __init__(self, reader: Reader, seconds: float) -> None:
        self._reader, self._seconds = reader, seconds

    def alive(self) -> bool:
        return self._reader.alive()

    def read(self, wants: Sequence[Want]) -> None:
        for want in wants:
            time.sleep(self._seconds)
            self._reader.read([want])


def throttled(reader: Reader) -> Reader:
    """``reader``, or one that is as slow as the environment says. ValueError if it says no number."""
    asked = os.environ.get(DISK_MS)
    return ThrottledReader(reader, float(asked) / 1000) if asked else reader
