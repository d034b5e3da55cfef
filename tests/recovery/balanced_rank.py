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
from eep.view import View
from tests.experts import model
from tests.experts.covered import Rank
from tests.recovery import session_rank

CHECKPOINT = "EEP_TEST_CHECKPOINT"
T = TypeVar("T")
SLOTS, STAGED, ASKED_EVERY, LOOKS_EVERY, HOT_FOR = 3, 3, 4, 10, 40


def switched_path(directory: Path, rank: int, incarnation: int) -> Path:
    """What the rank has switched, a byte each time."""
    return directory / f"switched-{rank}-{incarnation}"


def mismatch_path(directory: Path, rank: int) -> Path:
    """There if the rank had another placement than its peers, or other bytes than its placement says."""
    return directory / f"mismatch-{rank}"


class CheckedTurns(BalanceTurns):
    """As those of a server; and ranks tell each other their placements in every gathering."""

    def __init__(self, session: Session, world: World, balancer: Balancer, covered: Rank) -> None:
        super().__init__(session, WordExchange(world, "test/staged"), balancer, every=ASKED_EVERY)
        self._placements, self._covered = WordExchange(world, "test/placements"), covered
        self._directory = Path(os.environ["EEP_CONTROL_DIR"])

    def switch_if_agreed(self) -> None:
        before = self._covered.shown
        super().switch_if_agreed()
        if self._covered.shown is not before:
            self._check()
            with switched_path(self._directory, self._covered.rank, int(os.environ["EEP_INCARNATION"])).open("a") as to:
                to.write(".")

    def asking(self, gather: Callable[[], T], timeout: float) -> Callable[[], T]:
        asked = super().asking(gather, timeout)

        def gather_and_compare() -> T:
            gathered = asked()
            shown = self._covered.shown
            assert shown is not None
            heard = self._placements.exchange(int(shown.digest[:15], 16), timeout)
            if len(set(heard.values())) > 1:
                mismatch_path(self._directory, self._covered.rank).write_text(f"{self._session.view}: {heard}")
            return gathered

        return gather_and_compare

    def _check(self) -> None:
        try:
            self._covered.check()
        except AssertionError as error:
            mismatch_path(self._directory, self._covered.rank).write_text(f"wrong bytes: {error}")


def main() -> None:
    rank, incarnation = int(os.environ["EEP_RANK"]), int(os.environ["EEP_INCARNATION"])
    disk = Path(os.environ[CHECKPOINT])
    covered = Rank(member_rendezvous() / "experts", rank, SLOTS, disk, incarnation, staged=STAGED)
    counts: IntArray = np.zeros((model.LAYERS, model.EXPERTS), dtype=np.int64)
    steps = 0

    def counted() -> IntArray:
        return counts

    def repair(view: View) -> int | None:
        digest = covered.coverage.repair(view)
        if digest is not None:
            covered.check()
        return digest

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

    session_rank.main(repair, overlapped=True, make_turns=make_turns)
