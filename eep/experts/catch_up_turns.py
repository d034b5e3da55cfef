"""Where ranks tell each other which experts have arrived behind their steps: in the exchange of sizes before every so many.

All ranks hear the same, and each serves what was said before its next exchange of sizes, when steps under way are over. So
in every step all ranks mask the same experts. A rank that has not heard it is in the next epoch, and so are then all: there
ranks begin with what they hold (:mod:`.arrivals`). While nothing is missing, nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from eep.experts.balancing.switch_turn import SwitchTurn
from eep.experts.coverage import Coverage
from eep.view import View

T = TypeVar("T")
_EVERY = 16
"""Steps between two exchanges."""


class SteppedSession(Protocol):
    """What turns need of a session."""

    @property
    def view(self) -> View: ...

    def settle(self) -> None: ...


class Exchange(Protocol):
    def exchange(self, said: bytes, timeout: float) -> dict[int, bytes]: ...


class CatchUpTurns:
    """``every``: how many gatherings lie between two exchanges, the same on every rank."""

    def __init__(self, session: SteppedSession, exchange: Exchange, coverage: Coverage, every: int = _EVERY) -> None:
        self._session, self._exchange, self._coverage = session, exchange, coverage
        self._turn = SwitchTurn(every)
        self._heard: tuple[int, dict[int, bytes]] | None = None
        """In which epoch, and what each rank has said."""

    def switch_if_agreed(self) -> None:
        """Before an exchange of sizes. The steps under way end first: what they run must be there until then."""
        heard, self._heard = self._heard, None
        if heard is None:
            return
        self._session.settle()
        if self._session.view.epoch == heard[0]:
            self._coverage.serve_arrived(heard[1])

    def asking(self, gather: Callable[[], T], timeout: float) -> Callable[[], T]:
        """``gather``, and the exchange where it is time for it. ``timeout``: how many seconds a peer may take."""

        def gather_and_ask() -> T:
            if not self._coverage.is_behind:
                return gather()
            epoch = self._session.view.epoch
            if self._turn.begins(epoch):
                self._heard = epoch, self._exchange.exchange(self._coverage.arrived(), timeout)
            gathered = gather()
            self._turn.passed()
            return gathered

        return gather_and_ask
