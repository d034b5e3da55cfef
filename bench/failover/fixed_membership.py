"""The plugin's elasticity switched off and on in a running server, for the bench of failover alone.

This file is an SGLang plugin of its own, which :class:`Switch` puts beside a server; it does nothing in any other. While the
switch is thrown the membership is taken for fixed, as if no rank could ever be lost:

- a rank runs its step as it is: nothing is kept to run it again, the session does not look whether its results can be
  trusted, and no view is entered between steps;
- the front end sends a request to the rank that its client names, and keeps nothing of it (unless the switch is thrown for
  the ranks alone: then requests may be under way).

Everything else stays as it is: dispatch and combine, the process groups, the supervisor's threads. With overlap scheduling
a step is then launched before the last one is known to be good, as SGLang does by itself. A rank that dies while the switch
is thrown takes the server with it. However the switch is, the ranks note when their steps begin (bench/common/step_log.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common.server_switch import ServerSwitch, find_switch
from bench.common.step_log import note_steps, read_steps

_MODULE = "bench.failover.fixed_membership"
_ELASTIC, _FIXED, _RANKS_FIXED = 0, 1, 2

OF_A_RANK: dict[str, Callable[..., Any]] = {
    "collect": lambda session, gather: gather(),
    "run": lambda session, batch, passage=None: batch(),
    "begin": lambda session, batch, passage=None, *, again=None, wait=None, ahead=0: batch(),
    "settle": lambda session, leave=0, *, owed=None: None,
}
"""What the methods of :class:`eep.recovery.session.Session` do while the switch is thrown."""
OF_A_STEP_AHEAD: dict[str, Callable[..., Any]] = {
    "begin": lambda launched, session, forward, batch: forward(),
}
"""And those of :class:`sglang_patches.rank.overlap.LaunchedStep`: nothing is kept to run the step again."""
OF_THE_FRONT_END: dict[str, Callable[..., Any]] = {
    "send": lambda front_end, message: front_end._dispatch(message),
    "output": lambda front_end, output, late: None,
    "abort_answer": lambda front_end, message: True,
}


class Switch(ServerSwitch):
    """In the bench: elastic or not."""

    def __init__(self, folder: Path, *, stuck: bool = False) -> None:
        """A ``stuck`` one leaves elasticity on, whatever is done to it."""
        super().__init__(folder, _MODULE)
        self._stuck = stuck

    def throw(self, *, elastic: bool, front_end: bool = True) -> None:
        """No request may be under way, unless it is thrown for the ranks alone."""
        self.turn(_ELASTIC if elastic or self._stuck else _FIXED if front_end else _RANKS_FIXED)

    def steps(self) -> list[list[float]]:
        """When the latest steps of each rank began (``time.monotonic``)."""
        return read_steps(self.folder)


def register() -> None:
    """In every process of the server."""
    found = find_switch()
    if found is None:
        return
    switch, folder = found
    from eep.recovery.session import Session
    from sglang_patches.front_end.replay import FrontEnd
    from sglang_patches.rank.overlap import LaunchedStep

    def replace(owner: type, name: str, fixed: Callable[..., Any]) -> None:
        elastic = getattr(owner, name)
        says_fixed = (_FIXED,) if owner is FrontEnd else (_FIXED, _RANKS_FIXED)

        def either(*arguments: Any, **named: Any) -> Any:
            return (fixed if switch[0] in says_fixed else elastic)(*arguments, **named)

        setattr(owner, name, either)

    for owner, methods in ((Session, OF_A_RANK), (LaunchedStep, OF_A_STEP_AHEAD), (FrontEnd, OF_THE_FRONT_END)):
        for name, fixed in methods.items():
            replace(owner, name, fixed)
    note_steps(folder)
