"""The detokenizer of a server: another one takes its place when it ends.

Ranks send tokens to the detokenizer, which sends them to the front end with their text. When it ends, what it had is lost,
and so is how far it had decoded each text. In this order

1. the front end gives every request a new wire id, tells the ranks to connect anew, and sends the requests again with what
   their clients have (:meth:`sglang_patches.front_end.replay.FrontEnd.on_detokenizer_gone`);
2. the next detokenizer is started. It knows no request, so it decodes each from its first token on, as it does when a request
   has moved. What it makes of output for older wire ids is late, and no client sees it.

SGLang's own watchdog would end the server. It is given a :class:`Detokenizer`, which is alive for as long as it is watched.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from eep.control.launch.processes import describe_exit
from sglang_patches import hooks, options

logger = logging.getLogger(__name__)

_DETOKENIZER = "managers.detokenizer_manager.DetokenizerManager."
_LIVED_WELL = 10.0
_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_REAPED_WITHIN = 1.0


def register() -> None:
    hooks.hook("entrypoints.engine.Engine._launch_detokenizer_subprocesses", _launch)
    hooks.hook(_DETOKENIZER + "__init__", _end_alone)
    hooks.hook(_DETOKENIZER + "event_loop", _end_alone)


def pause_before(start: int) -> float:
    """How many seconds to wait before the ``start``-th start in a row after short lives."""
    return 0.0 if start <= 1 else min(_PAUSE * 2.0 ** min(start - 2, 16), _LONGEST_PAUSE)


class Detokenizer:
    """What SGLang takes for the process of its detokenizer: one process after the other. ``start`` starts the next.

    Until it is watched, it is alive when its process is. :meth:`watch` and :meth:`stop` are called from the thread of the
    server's event loop.
    """

    def __init__(self, process: Any, start: Callable[[], Any]) -> None:
        self._process, self._start = process, start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pidfd: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._failures = 0

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def exitcode(self) -> int | None:
        code: int | None = None if self._loop is not None else self._process.exitcode
        return code

    def is_alive(self) -> bool:
        return self._loop is not None or bool(self._process.is_alive())

    def watch(
        self,
        loop: asyncio.AbstractEventLoop,
        gone: Callable[[], None],
        give_up: Callable[[str], None],
        limit: int,
    ) -> None:
        """Call ``gone()`` whenever the process has ended, and then start another. When more than ``limit`` in a row have
        ended soon after their start, call ``give_up(why)``."""
        self._loop, self._gone, self._give_up, self._limit = loop, gone, give_up, limit
        self._follow(loop)

    def stop(self) -> None:
        """Its end is expected from now on. A second call does nothing."""
        self._let_go()
        if self._timer is not None:
            self._timer.cancel()

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        self._since = loop.time()
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._timer = loop.call_later(0, self._ended)
            return
        loop.add_reader(self._pidfd, self._ended)
        if not self._process.is_alive():  # it had ended before, and another process may have its number
            self._let_go()
            self._timer = loop.call_later(0, self._ended)

    def _let_go(self) -> None:
        if self._pidfd is not None and self._loop is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _ended(self) -> None:
        assert self._loop is not None
        self._let_go()
        self._process.join(_REAPED_WITHIN)
        ended = f"the detokenizer (process {self.pid}) has ended ({describe_exit(self._process.exitcode)})"
        logger.warning("%s; requests go on from what their clients have, and another is started", ended)
        if self._loop.time() - self._since >= _LIVED_WELL:
            self._failures = 0
        self._gone()
        self._start_later(self._loop)

    def _start_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._failures += 1
        if self._failures > self._limit:
            self._give_up(f"the detokenizer failed {self._failures} times in a row, at its start or soon after")
        else:
            self._timer = loop.call_later(pause_before(self._failures), self._start_again)

    def _start_again(self) -> None:
        assert self._loop is not None
        try:
            self._process = self._start()
        except Exception as error:  # whatever it is, a server without a detokenizer would wait for ever
            logger.error("the detokenizer cannot be started: %s", error)
            self._start_later(self._loop)
            return
        logger.info("the next detokenizer is process %d", self.pid)
        self._follow(self._loop)


_current: Detokenizer | None = None


def current() -> Detokenizer | None:
    """That of the server which this process has launched. None if it has several, which SGLang watches itself."""
    return _current


# The hooks.


def _launch(original: Callable[..., Any], cls: type, *arguments: Any, **named: Any) -> Any:
    global _current
    processes, names = original(cls, *arguments, **named)
    if options.current() is None or len(processes) != 1:
        return processes, names
    _current = Detokenizer(processes[0], lambda: original(cls, *arguments, **named)[0][0])
    return [_current], names


def _end_alone(original: Callable[..., Any], manager: Any, *arguments: Any, **named: Any) -> Any:
    """In the detokenizer. After an exception SGLang signals the process that this one was forked from, and the server would
    end with that."""
    try:
        return original(manager, *arguments, **named)
    except Exception:
        logger.exception("an exception ends the detokenizer")
        raise SystemExit(1) from None
