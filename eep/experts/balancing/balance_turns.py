"""Where ranks ask each other whether all have staged the same moves: in the exchange of sizes before every so many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from eep.experts.balancing.balancer import Balancer
from eep.experts.balancing.switch_turn import NOTHING, SwitchTurn
from eep.recovery.session import Session
from eep.recovery.words import WordExchange

T = TypeVar("T")

_EVERY = 32
"""Steps between two questions: rarely enough to cost nothing, and a switch waits for no more than so many."""


class BalanceTurns:
    """``every``: how many gatherings lie between two questions, the same on every rank."""

    def __init__(self, session: Session, words: WordExchange, balancer: Balancer, every: int = _EVERY) -> None:
        self._session, self._words, self._turn = session, words, SwitchTurn(every)
        self.balancer = balancer

    def switch_if_agreed(self) -> None:
        """Before an exchange of sizes. The steps under way end first: what they run must be there until then."""
        epoch = self._session.view.epoch
        if (word := self._turn.agreed(epoch)) == NOTHING:
            return
        self._session.settle()
        if self._session.view.epoch == epoch:
            self.balancer.switch(word)

    def asking(self, gather: Callable[[], T], timeout: float) -> Callable[[], T]:
        """``gather``, and the question where it is time for it. ``timeout``: how many seconds a peer may take to answer."""

        def gather_and_ask() -> T:
            if self._turn.begins(self._session.view.epoch):
                self._turn.heard(self._words.exchange(self.balancer.word(), timeout))
            gathered = gather()
            self._turn.passed()
            return gathered

        return gather_and_ask
