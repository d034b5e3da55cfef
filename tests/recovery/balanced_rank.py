"""A rank that runs steps in a session while experts move: in every gathering, all ranks must have the same placement."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from eep.control.private_directory import member_rendezvous
from eep.experts.balancing.balance_turns import BalanceTurns
from eep.experts.balancing.balancer import Balancer
from eep.experts.balancing.leader import BalancePolicy
from eep.experts.placement.packing import IntArray
from eep.process_group.world import World
from eep.recovery.session import Session
from eep.recovery.words import WordExchange
from tests.experts import model
from tests.experts.covered import Rank
from tests.recovery import session_rank
from tests.recovery.compared_placements import ASKED_EVERY, CHECKPOINT, SLOTS, ComparedPlacements, checked_repair

T = TypeVar("T")
STAGED, LOOKS_EVERY, HOT_FOR = 3, 10, 40


class CheckedTurns(BalanceTurns):
    """As those of a server; and ranks tell each other their placements in every gathering."""

    def __init__(self, session: Session, world: World, balancer: Balancer, covered: Rank) -> None:
        super().__init__(session, WordExchange(world, "test/staged"), balancer, every=ASKED_EVERY)
        self._covered, self._compared = covered, ComparedPlacements(session, world, covered)

    def switch_if_agreed(self) -> None:
        before = self._covered.shown
        super().switch_if_agreed()
        if self._covered.shown is not before:
            self._compared.switched()

    def asking(self, gather: Callable[[], T], timeout: float) -> Callable[[], T]:
        return self._compared.comparing(super().asking(gather, timeout), timeout)


def main() -> None:
    rank, incarnation = int(os.environ["EEP_RANK"]), int(os.environ["EEP_INCARNATION"])
    disk = Path(os.environ[CHECKPOINT])
    covered = Rank(member_rendezvous() / "experts", rank, SLOTS, disk, incarnation, staged=STAGED)
    counts: IntArray = np.zeros((model.LAYERS, model.EXPERTS), dtype=np.int64)
    steps = 0

    def counted() -> IntArray:
        return counts

    class CountingBalancer(Balancer):
        """Three experts in a row are hot, and after a while the next three."""

        def stepped(self) -> None:
            nonlocal steps
            steps += 1
            hot = 3 * (steps // HOT_FOR)
            counts[:] += 10
            counts[:, [(hot + each) % model.EXPERTS for each in range(3)]] += 1000
            super().stepped()

    def make_turns(session: Session, world: Any) -> BalanceTurns:
        balancer = CountingBalancer((rank, incarnation), covered.coverage, counted, BalancePolicy(LOOKS_EVERY))
        balancer.start()
        return CheckedTurns(session, world, balancer, covered)

    session_rank.main(checked_repair(covered), overlapped=True, make_turns=make_turns)
