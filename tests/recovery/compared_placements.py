"""What ranks that change their placement while they run are checked by: in every gathering all have the same one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from eep.process_group.world import World
from eep.recovery.session import Session
from eep.recovery.words import WordExchange
from eep.view import View
from tests.experts.covered import Rank

T = TypeVar("T")
CHECKPOINT = "EEP_TEST_CHECKPOINT"
"""The variable that names the checkpoint on the disk."""
SLOTS, ASKED_EVERY = 3, 4


def switched_path(directory: Path, rank: int, incarnation: int) -> Path:
    """What the rank has switched, a byte each time."""
    return directory / f"switched-{rank}-{incarnation}"


def mismatch_path(directory: Path, rank: int) -> Path:
    """There if the rank had another placement than its peers, or other bytes than its placement says."""
    return directory / f"mismatch-{rank}"


class ComparedPlacements:
    """Of one rank. Its peers have one, too."""

    def __init__(self, session: Session, world: World, covered: Rank) -> None:
        self._session, self._covered = session, covered
        self._placements = WordExchange(world, "test/placements")
        self._directory = Path(os.environ["EEP_CONTROL_DIR"])

    def switched(self) -> None:
        """The rank has another placement than before."""
        try:
            self._covered.check()
        except AssertionError as error:
            self._mismatch.write_text(f"wrong bytes: {error}")
        with switched_path(self._directory, self._covered.rank, int(os.environ["EEP_INCARNATION"])).open("a") as to:
            to.write(".")

    def comparing(self, gather: Callable[[], T], timeout: float) -> Callable[[], T]:
        """``gather``; and then ranks tell each other their placements."""

        def gather_and_compare() -> T:
            gathered = gather()
            shown = self._covered.shown
            assert shown is not None
            heard = self._placements.exchange(int(shown.digest[:15], 16), timeout)
            if len(set(heard.values())) > 1:
                self._mismatch.write_text(f"{self._session.view}: {heard}")
            return gathered

        return gather_and_compare

    @property
    def _mismatch(self) -> Path:
        return mismatch_path(self._directory, self._covered.rank)


def checked_repair(covered: Rank) -> Callable[[View], int | None]:
    def repair(view: View) -> int | None:
        digest = covered.coverage.repair(view)
        if digest is not None:
            covered.check()
        return digest

    return repair
