"""A view of a server that is renewed until its user ends it, and says since when there has been no answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

_CLEAR = "\x1b[H\x1b[2J"
Absence = Callable[[str, float, str], str]
"""What is shown while there is no answer: from the last answer, since when, and why."""


def with_absence(last: str, since: float, why: str) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(since))
    return f"{last}\n\nno answer since {when}: {why}"


def watch(look: Callable[[], str], every: float, absence: Absence = with_absence) -> NoReturn:
    """Shows what ``look`` gives, every so many seconds. What it raises at first is raised: a wrong name must not look like a
    server that is away. Later on the view says so, and goes on."""
    last, since = look(), time.time()
    with _screen() as show:
        show(last)
        while True:
            time.sleep(every)
            try:
                last, since = look(), time.time()
                show(last)
            except (OSError, ValueError) as error:
                show(absence(last, since, str(error)))


@contextmanager
def _screen() -> Iterator[Callable[[str], None]]:
    """On a terminal a page that is drawn anew, with the package ``rich`` without a flicker; else one text after another."""
    if not sys.stdout.isatty():
        yield lambda text: print(text, flush=True)
        return
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        yield lambda text: print(f"{_CLEAR}{text}", flush=True)
        return
    with Live(screen=True, auto_refresh=False) as live:
        yield lambda text: live.update(Text.from_ansi(text), refresh=True)
