"""Logs one line for each change of who is in, and one for each rank that settles in it.

Pass it to :meth:`.supervisor.Supervisor.watch_effects`, and its :meth:`ChangeLog.hear` to
:meth:`.supervisor.Supervisor.watch_reports`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from eep.membership import Effect
from eep.observe.change_summary import (
    ChangeReport,
    EndedChange,
    MovedTold,
    OpenChange,
    RepairTold,
    SettledRank,
    add_report,
    add_to_change,
    describe_open,
    rank_settled,
)

logger = logging.getLogger(__name__)

WAITS_FOR_REPORTS = 0.5
"""How many seconds after a change its line is written: the front end moves requests beside it."""


class ChangeLog:
    """``as_json``: a line is a JSON object, as SGLang's are with ``--log-requests-format json``. ``also``: is told of each
    change, too."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        as_json: bool = False,
        also: Callable[[EndedChange], None] | None = None,
    ) -> None:
        self._change, self._clock = OpenChange(), clock
        self._as_json, self._also = as_json, also
        self._waiting: list[EndedChange] = []
        self._last: EndedChange | None = None

    def __call__(self, effect: Effect) -> None:
        self._change, ended = add_to_change(self._change, effect, self._clock())
        if ended is None:
            return
        self._last = ended
        self._waiting.append(ended)
        try:
            asyncio.get_running_loop().call_later(WAITS_FOR_REPORTS, self.write_oldest)
        except RuntimeError:  # nobody will report anything where no loop runs
            self.write_oldest()

    def hear(self, report: ChangeReport) -> None:
        """What a rank or the front end tells. It belongs to the change under way, unless the rank was lost in one before."""
        if isinstance(report, MovedTold):
            for index, ended in enumerate(self._waiting):
                if (report.rank, report.incarnation) in ended.lost:
                    self._waiting[index] = now = replace(ended, moved=ended.moved + report.requests)
                    self._last = now if ended is self._last else self._last
                    return
        if (
            isinstance(report, RepairTold)
            and (settled := rank_settled(self._change, report, self._clock())) is not None
        ):
            self._write("eep.settled", settled)
        self._change = add_report(self._change, report)

    def status(self) -> dict[str, Any]:
        """The change under way, and the last one that ended, for operators."""
        return {
            "under_way": describe_open(self._change, self._clock()),
            "last": None if self._last is None else self._last.fields(),
        }

    def write_oldest(self) -> None:
        """Write the line of the oldest change that waits for one."""
        ended = self._waiting.pop(0)
        self._write("eep.change", ended)
        if self._also is not None:
            self._also(ended)

    def _write(self, event: str, told: EndedChange | SettledRank) -> None:
        if self._as_json:
            logger.info("%s", json.dumps({"timestamp": datetime.now().isoformat(), "event": event, **told.fields()}))
        else:
            logger.info("eep: %s", told)
