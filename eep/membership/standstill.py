"""For how long a rank has made no progress, from the looks that its supervisor takes at its progress word.

A word that has not changed proves nothing while the supervisor does not look: a machine that was suspended stops ranks and
supervisor alike. So a look counts for no more than the time after which it was due.
"""

from __future__ import annotations

from dataclasses import dataclass

from eep.membership.state import HostState, phase_name


@dataclass(frozen=True, slots=True)
class Standstill:
    """What the looks at one life of a rank have shown: its word, and for how many seconds that has stayed the same."""

    incarnation: int
    word: int
    looked_at: float
    seconds: float = 0.0


def must_advance(state: HostState, rank: int) -> bool:
    """Whether a rank has to make progress now: while the instance runs, and until the rank has settled in a new view.

    One that has settled waits for the others. One that starts has no progress word yet."""
    local, phase = state.ranks[rank], phase_name(state)
    if state.policy.stall_deadline <= 0 or not (local.runs and state.is_in(rank)):
        return False
    return phase == "RUN" or (phase == "AGREED" and local.settled != state.epoch)


def after_look(before: Standstill | None, incarnation: int, word: int, now: float, due_after: float) -> Standstill:
    """What is known after a look at ``now`` that was due ``due_after`` seconds after the one before."""
    if before is None or (before.incarnation, before.word) != (incarnation, word):
        return Standstill(incarnation, word, now)
    passed = max(0.0, min(now - before.looked_at, due_after))
    return Standstill(incarnation, word, now, before.seconds + passed)


def has_stalled(seen: Standstill, deadline: float) -> bool:
    return seen.seconds >= deadline
