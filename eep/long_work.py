"""Work of this process that may take long, such as a repair, says again and again that it gets on.

What hears it is the progress word of the rank, if there is one. Only the thread whose work the word is about is heard: a rank
that hangs may have other threads that get on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ALL_COMPLETED, Future, wait
from typing import Any

_SAYS_EVERY_S = 1.0
_told: tuple[int, Callable[[], object]] | None = None


def tell(listener: Callable[[], object]) -> None:
    """From now on ``listener`` hears of the long work of this thread."""
    global _told
    _told = (threading.get_ident(), listener)


def get_on() -> None:
    """Say that this thread gets on with its work."""
    if _told is not None and _told[0] == threading.get_ident():
        _told[1]()


def wait_in_parts(
    futures: Collection[Future[Any]], within: float, until: str = ALL_COMPLETED
) -> tuple[set[Future[Any]], set[Future[Any]]]:
    """``concurrent.futures.wait`` in a thread that gets on: this wait has an end. Returns what is done, and what is not."""
    end = time.monotonic() + within
    while True:
        left = max(0.0, end - time.monotonic())
        done, not_done = wait(futures, timeout=min(left, _SAYS_EVERY_S), return_when=until)
        get_on()
        is_enough = not not_done or (done and until != ALL_COMPLETED)
        if is_enough or left <= _SAYS_EVERY_S:
            return done, not_done
