"""Logs one line for each change of who is in. Pass it to :meth:`.supervisor.Supervisor.watch_effects`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from eep.membership import Effect
from eep.observe.change_summary import OpenChange, add_to_change

logger = logging.getLogger(__name__)


class ChangeLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._change, self._clock = OpenChange(), clock

    def __call__(self, effect: Effect) -> None:
        self._change, line = add_to_change(self._change, effect, self._clock())
        if line is not None:
            logger.info("eep: %s", line)
