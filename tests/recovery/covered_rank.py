"""A rank that runs steps in a session, keeps experts covered, and verifies them at every change of view."""

from __future__ import annotations

import os
from pathlib import Path

from eep.control.private_directory import member_rendezvous
from eep.view import View
from tests.experts.covered import Rank
from tests.recovery import session_rank

CHECKPOINT = "EEP_TEST_CHECKPOINT"
SLOTS = 3
"""For eight experts on four ranks: when one is lost the others must bring in its experts; two cannot hold them all."""


def main() -> None:
    rank, incarnation = int(os.environ["EEP_RANK"]), int(os.environ["EEP_INCARNATION"])
    covered = Rank(member_rendezvous() / "experts", rank, SLOTS, Path(os.environ[CHECKPOINT]), incarnation)

    def repair(view: View) -> int | None:
        digest = covered.coverage.repair(view)
        if digest is not None:
            covered.check()
        return digest

    session_rank.main(repair, overlapped=True)
