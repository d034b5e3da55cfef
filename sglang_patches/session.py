"""What the scheduler's step needs of the control plane, and the simplest thing that provides it.

:class:`Session` is the interface; ``eep.recovery`` has the one that survives losses. :class:`FixedSession` is for ranks that no
supervisor watches: all of them meet at the start, and a loss ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from eep.buffer import Buffer
from eep.view import View

_MEET_WITHIN = 300.0


class Session(Protocol):
    def boundary(self) -> View:
        """Called before each step. Applies views, repairs experts, and returns when the instance runs."""

    def check(self) -> bool:
        """Called after each forward pass. True: the step may be committed. False: run it again after the next boundary."""

    def register_repair(self, callback: Callable[[View], None]) -> None:
        """Have ``callback`` called whenever a new view was applied, before the instance runs under it."""


class FixedSession:
    """All ranks, from the start to the end."""

    def __init__(self, buffer: Buffer, ranks: int) -> None:
        self._buffer = buffer
        self._ranks = range(ranks)
        self._repairs: list[Callable[[View], None]] = []
        self._is_connected = False

    def boundary(self) -> View:
        if not self._is_connected:
            view = self._buffer.connect_ranks(self._ranks, timeout=_MEET_WITHIN)
            for repair in self._repairs:
                repair(view)
            self._is_connected = True
        return self._buffer.view

    def check(self) -> bool:
        self._buffer.status().raise_if_bad()
        return True

    def register_repair(self, callback: Callable[[View], None]) -> None:
        self._repairs.append(callback)
