"""A rank that brings experts in behind its steps: in every gathering, all ranks must serve the same part of the placement."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from eep.control.private_directory import member_rendezvous
from eep.experts.catch_up_turns import CatchUpTurns
from eep.process_group.world import World
from eep.recovery.session import Session
from eep.recovery.words import BytesExchange
from tests.experts import model
from tests.experts.covered import Rank, counts_of
from tests.recovery import session_rank
from tests.recovery.compared_placements import ASKED_EVERY, CHECKPOINT, SLOTS, ComparedPlacements, checked_repair

T = TypeVar("T")


class CheckedTurns(CatchUpTurns):
    """As those of a server; and ranks tell each other what they serve in every gathering."""

    def __init__(self, session: Session, world: World, covered: Rank) -> None:
        told = BytesExchange(world, "test/arrived", covered.coverage.packed_bytes)
        super().__init__(session, told, covered.coverage, every=ASKED_EVERY)
        self.balancer = SimpleNamespace(stepped=lambda: None)
        self._compared = ComparedPlacements(session, world, covered)

    def switch_if_agreed(self) -> None:
        was_behind = self._coverage.is_behind
        super().switch_if_agreed()
        if was_behind and not self._coverage.is_behind:
            self._compared.switched()

    def asking(self, gather: Callable[[], T], timeout: float) -> Callable[[], T]:
        return self._compared.comparing(super().asking(gather, timeout), timeout)


def main() -> None:
    rank, incarnation = int(os.environ["EEP_RANK"]), int(os.environ["EEP_INCARNATION"])
    disk = Path(os.environ[CHECKPOINT])
    covered = Rank(
        *(member_rendezvous() / "experts", rank, SLOTS, disk, incarnation, "mask", counts_of(rank)), mask_after=0.0
    )
    assert model.EXPERTS > 2 * SLOTS, "two ranks do not do"

    def make_turns(session: Session, world: Any) -> Any:
        return CheckedTurns(session, world, covered)

    session_rank.main(checked_repair(covered), overlapped=True, make_turns=make_turns)
