"""What is known of a rank, in a word."""

from __future__ import annotations

from enum import StrEnum


class PeerState(StrEnum):
    """True for a rank that is there and ready: one that is in the view, or that only has to be let in."""

    ACTIVE = "active"
    """In the view."""
    DEAD = "dead"
    """In the view, and its process has ended."""
    LEFT = "left"
    """In the view, and it has said that it takes part in nothing any more."""
    WAITING = "waiting"
    """It asks to be let in."""
    STARTING = "starting"
    """It is there, and not ready."""
    ABSENT = "absent"

    def __bool__(self) -> bool:
        return self in (PeerState.ACTIVE, PeerState.WAITING)
