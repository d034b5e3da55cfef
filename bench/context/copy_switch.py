"""The copy of contexts in host memory put to rest and to work again in a running server, for the bench of its cost alone.

This file is an SGLang plugin of its own, which :class:`Switch` puts beside a server. While the copy rests its thread still
wakes, finds that the switch is off, and sleeps again. What requests have got meanwhile is never copied: when the copy is back
at work, it takes up where they are then. Otherwise it would have to copy twice as much as it does when it is always at work.
So no rank may be killed in such a server: its copies have gaps. However the switch is, the ranks note when their steps begin
and how much they copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from bench.common.moment_log import MomentLog, read_moments
from bench.common.server_switch import ServerSwitch, find_switch
from bench.common.step_log import note_steps, read_steps

_MODULE = "bench.context.copy_switch"
_ON, _OFF = 0, 1
_COPIED = "copied"
_EVERYTHING = 1 << 40


class Switch(ServerSwitch):
    """In the bench: whether the copy is at work."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _MODULE)

    def throw(self, on: bool) -> None:
        self.turn(_ON if on else _OFF)

    def steps(self) -> list[list[float]]:
        """When the latest steps of each rank began (``time.monotonic``)."""
        return read_steps(self.folder)

    def copied(self) -> list[tuple[float, int]]:
        """When some tokens were copied, and how many, of all ranks."""
        return [noted for of_rank in read_moments(self.folder, _COPIED) for noted in of_rank]


def copied_within(copied: Sequence[tuple[float, int]], times: Sequence[tuple[float, float]]) -> int:
    """How many tokens, in all of these times together."""
    return sum(tokens for at, tokens in copied if any(since <= at < until for since, until in times))


def register() -> None:
    """In every process of the server."""
    found = find_switch()
    if found is None:
        return
    switch, folder = found
    from sglang_patches.rank.kv.host_copy import HostCopy

    note_steps(folder)
    _note_copied(folder)
    work, resting = HostCopy.copy_some, WeakSet[Any]()

    def either(copy: HostCopy) -> bool:
        if switch[0] == _OFF:
            resting.add(copy)
            return False
        if copy in resting:
            resting.discard(copy)
            _skip(copy)
        return work(copy)

    HostCopy.copy_some = either  # type: ignore[method-assign, assignment]


def _skip(copy: Any) -> None:
    """What could be copied now counts as copied."""
    seen = copy._journal.look()
    moves = copy._plan.next(seen.turns, seen.tokens, _EVERYTHING)
    if len(moves.given_up):
        copy._writer.clear(moves.given_up)
    copy._plan.settle(moves, np.ones(len(moves.pages), bool))


def _note_copied(folder: Path) -> None:
    """Where pages are entered: no page counts before."""
    from eep.requests.kv.copy_index import CopyWriter
    from eep.requests.kv.copy_layout import PAGE

    enter = CopyWriter.enter
    log: MomentLog | None = None  # made by the process that copies: it may have been forked from this one

    def noting(writer: CopyWriter, pages: Any, *arguments: Any) -> None:
        nonlocal log
        enter(writer, pages, *arguments)
        if log is None:
            log = MomentLog(folder, _COPIED)
        log.note(PAGE * len(pages))

    CopyWriter.enter = noting  # type: ignore[method-assign, assignment]
