"""When ranks ask each other whether all have staged the same moves, and when they switch. Decisions only.

Ranks gather before every step, and all count these gatherings of an epoch alike: one that fails ends the epoch for all. Every
so many, each says which moves it has staged. Where all say the same, each switches before its next gathering, when the step
between is over. Whoever has not heard that is in the next epoch, and so is then everybody: the log says what counts there.
"""

from __future__ import annotations

from collections.abc import Mapping

NOTHING = 0
"""What a rank says that has staged nothing."""


class SwitchTurn:
    """``every``: how many gatherings lie between two questions."""

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"ranks ask at least at every gathering, got every={every}")
        self._every = every
        self._epoch = -1
        self._passed = 0
        self._agreed = NOTHING

    def begins(self, epoch: int) -> bool:
        """A gathering begins. Returns whether ranks say in it what they have staged."""
        if epoch != self._epoch:
            self._epoch, self._passed, self._agreed = epoch, 0, NOTHING
        return self._passed % self._every == self._every - 1

    def heard(self, words: Mapping[int, int]) -> None:
        """What the ranks have said, this one among them."""
        said = set(words.values())
        self._agreed = said.pop() if len(said) == 1 else NOTHING

    def passed(self) -> None:
        """The gathering is over, and all ranks took part in it."""
        self._passed += 1

    def agreed(self, epoch: int) -> int:
        """What to switch to now, in ``epoch``: the word that all have said, or ``NOTHING``. Says so once."""
        word, self._agreed = self._agreed, NOTHING
        return word if epoch == self._epoch else NOTHING
