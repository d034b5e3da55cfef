"""A rank of a session in which rank 1 cannot do its part of the repair unless all ranks are there."""

from __future__ import annotations

import os

from eep.view import View
from tests.recovery import session_rank


def main() -> None:
    session_rank.main(repair, deadline_ms=60_000)  # the supervisor may replace no rank but the one that is killed


def repair(view: View) -> int:
    lacks = int(os.environ["EEP_RANK"]) == 1 and len(view.active) < view.max_ranks
    return 0 if lacks else 7
