"""What a host is to do. The core says what and why; the supervisor does it, and the simulator pretends to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from eep.membership.events import Deadline
from eep.membership.records import InstanceRecord, Phase, Report
from eep.view import View


@dataclass(frozen=True, slots=True)
class Revoke:
    """End every wait of epochs up to ``epoch`` on the local ranks, now."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Propose:
    """Put ``instance`` in the store if the version there is still ``expected`` (0: if there is none)."""

    instance: InstanceRecord
    expected: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Make this the report of this host."""

    report: Report


@dataclass(frozen=True, slots=True)
class ListReports:
    """List the reports again: what is known of them is older than the record."""


@dataclass(frozen=True, slots=True)
class Fence:
    """SIGKILL, and tell when the exit was seen."""

    rank: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the process of a rank."""

    rank: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell the local ranks how the instance stands."""

    view: View
    phase: Phase


@dataclass(frozen=True, slots=True)
class SetTimer:
    deadline: Deadline
    delay: float


@dataclass(frozen=True, slots=True)
class Reject:
    """Something was asked or told that cannot be: it changed nothing; count it under ``kind`` and show ``reason``."""

    kind: str
    reason: str


class LossCause(Enum):
    """What ended a life of a rank, or is about to."""

    EXIT = "exit"
    """Its process died unasked, whatever the reason."""
    LEFT = "left"
    """It was asked to leave, and has ended."""
    EXCEPTION = "exception"
    STALLED = "stalled"
    STOPPED = "stopped"
    SUSPECTED = "suspected"
    LATE = "late"
    """It did not start, settle or leave in time."""
    OPERATOR = "operator"
    HARDWARE = "hardware"
    """Its device, or its host, was said to have failed."""
    END = "end"
    """Its supervisor ends."""
    OUTSIDE = "outside"
    """It was not, or no longer, part of the instance."""


@dataclass(frozen=True, slots=True)
class RankGone:
    """This life of a local rank is over, or is being ended: expect nothing more of it.

    The core says so once for each life, at the first sign of its end: it began to die, it is fenced, or it
    exited. Requests that ran there are replayed elsewhere. ``asked_to_leave``: the end was planned, so it is
    no death. ``failed``: an exception in the rank itself ends it, and what it worked on may be the cause.
    """

    rank: int
    incarnation: int
    cause: str
    asked_to_leave: bool = False
    failed: bool = False
    kind: LossCause = LossCause.EXIT


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The instance, as this host sees it, entered ``phase`` (see :func:`eep.membership.phase_name`) or an epoch."""

    phase: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Transition:
    """A line for the event log, for people to read. Code must not act on it."""

    phase: str
    epoch: int
    cause: str
    rank: int = -1
    incarnation: int = -1
    evidence: str = ""
    operation: str = ""


Effect = (
    Revoke
    | Propose
    | Publish
    | ListReports
    | Fence
    | Launch
    | Notify
    | SetTimer
    | Reject
    | RankGone
    | PhaseChanged
    | Transition
)
