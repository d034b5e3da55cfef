"""Whether a rank that is started now could have its files in the supervisor's directory.

A rank needs a lock and sockets there, and ends without them. Starts that must fail would use up its tries, so they wait until
a file can be made. Ranks that run need no new file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from eep.room import RoomNotice, advice, why_no_file

LOOKS_EVERY = 0.5

logger = logging.getLogger(__name__)


class RoomWatch:
    """``note(phase, cause)`` writes a line to the event log."""

    def __init__(self, directory: Path, note: Callable[[str, str], None]) -> None:
        self._directory, self._note = directory, note
        self._notice = RoomNotice(logger, directory, "the ranks that run go on, and no rank is started")

    async def wait(self) -> None:
        """Return when a rank could make its files."""
        while (error := why_no_file(self._directory)) is not None:
            if self._notice.lacking(error):
                self._note("NO-ROOM", advice(self._directory, error))
            await asyncio.sleep(LOOKS_EVERY)
        if self._notice.found():
            self._note("ROOM", f"files in {self._directory} can be written again, and ranks are started")
