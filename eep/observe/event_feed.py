"""The newest lines of an event log, each with an id, so that a reader who was cut off goes on where it was.

An id is ``LIFE.NUMBER``. ``LIFE`` names the server's life: a reader who comes with the id of another life gets everything
that is there. A thread reads the log; readers and the thread meet in an event loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from eep.observe.event_log import notice_line, read_lines

MOST_LINES = 4096
LOOKS_EVERY = 0.1


class EventFeed:
    """Pure but for :meth:`wait`: the lines that are kept, and those after an id."""

    def __init__(self, life: str, most: int = MOST_LINES) -> None:
        self.life = life
        self._lines: deque[str] = deque(maxlen=most)
        self._first = 1
        """The number of the oldest line that is kept."""
        self._waiting: set[asyncio.Future[None]] = set()

    def add(self, line: str) -> None:
        if len(self._lines) == self._lines.maxlen:
            self._first += 1
        self._lines.append(line)
        for waits in self._waiting:
            if not waits.done():
                waits.set_result(None)

    @property
    def newest(self) -> str:
        """The id of the newest line."""
        return f"{self.life}.{self._first + len(self._lines) - 1}"

    def after(self, ident: str) -> list[tuple[str, str]]:
        """The id and text of each line that follows ``ident``: all that are kept for an id that this life has not given. One
        line tells of those that are kept no more since ``ident``."""
        life, _, number = ident.rpartition(".")
        is_ours = life == self.life and number.isascii() and number.isdecimal() and len(number) < 19
        last = int(number) if is_ours else 0
        if last >= self._first + len(self._lines):
            is_ours, last = False, 0
        skip, lost = max(0, last + 1 - self._first), self._first - last - 1
        kept = list(self._lines)[skip:]
        found = [(f"{self.life}.{self._first + skip + index}", line) for index, line in enumerate(kept)]
        if is_ours and lost > 0:
            gap = notice_line("MISSED", f"{lost} lines before this one are not kept any more")
            found.insert(0, (f"{self.life}.{self._first - 1}", json.dumps(asdict(gap))))
        return found

    async def wait(self, seconds: float) -> None:
        """Until there is another line, or for so long."""
        waits = asyncio.get_running_loop().create_future()
        self._waiting.add(waits)
        try:
            await asyncio.wait({waits}, timeout=seconds)
        finally:
            self._waiting.discard(waits)

    async def settle(self, seconds: float) -> None:
        """Until the thread that reads the log has had time to read all of it, which takes a look without a new line; at most
        so long."""
        end = asyncio.get_running_loop().time() + seconds
        while (left := end - asyncio.get_running_loop().time()) > 0:
            before = self.newest
            await self.wait(min(left, 2 * LOOKS_EVERY))
            if self.newest == before:
                return


def follow_log(path: Path, told: Callable[[str], None]) -> threading.Event:
    """From now on a thread calls ``told`` with every line of the log at ``path``, the first ones too, until the log is
    removed or the event that is returned is set."""
    ending = threading.Event()

    def wait() -> None:
        if ending.wait(LOOKS_EVERY):
            raise _Ended

    def read() -> None:
        try:
            for line in read_lines(path, wait):
                told(line.rstrip("\n"))
        except (_Ended, OSError, RuntimeError):  # the loop that it tells has ended
            return

    threading.Thread(target=read, name="eep-events", daemon=True).start()
    return ending


class _Ended(Exception):
    pass
