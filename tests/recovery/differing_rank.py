"""A rank of a session in which the first life of rank 2 places experts differently once a rank was lost."""

from __future__ import annotations

import os

from eep.view import View
from tests.recovery import session_rank


def main() -> None:
    session_rank.main(repair, deadline_ms=60_000)  # the supervisor may replace no rank but those that end


def repair(view: View) -> int:
    differs = int(os.environ["EEP_RANK"]) == 2 and view.incarnations[2] == 0 and len(view.active) < view.max_ranks
    return 8 if differs else 7
