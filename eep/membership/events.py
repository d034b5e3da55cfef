"""What can happen to a host. Each event is an observed fact; none changes membership by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from eep.membership.news import News
from eep.membership.records import InstanceRecord, Report

EVERY_HOST = "*"
"""The scope of a listing that holds the reports of all hosts."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The process of a local rank ended; ``clean`` when it returned zero of its own accord."""

    rank: int
    incarnation: int
    evidence: str
    clean: bool = False


@dataclass(frozen=True, slots=True)
class PulseStopped:
    """The process of a local rank has begun to die; its exit will follow, in its own time."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A local rank says that an exception ends it: what it worked on may be the cause. No signal from outside is."""

    rank: int
    incarnation: int
    evidence: str


class StallKind(Enum):
    """What is known of a rank that makes no progress. The value is for the log."""

    SILENT = ""
    STOPPED = "its process is stopped"
    """It will not run until it is told to."""
    HANGS = "it hangs"
    """Its thread sleeps though it waits for no peer and no device, and nothing of its process gets on."""
    SPINS = "it computes without end"
    """Its thread computes, alone, for longer than it could have a reason to."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """A local rank that has work made no progress for that many seconds."""

    rank: int
    incarnation: int
    seconds: float
    kind: StallKind = StallKind.SILENT


@dataclass(frozen=True, slots=True)
class Ready:
    """A local rank has loaded what it needs and can take part."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A local rank has applied the view of ``epoch`` and repaired what it had to."""

    rank: int
    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Suspected:
    """A local rank waited for ``suspects`` past its deadline."""

    rank: int
    incarnation: int
    epoch: int
    suspects: tuple[int, ...]
    evidence: str


@dataclass(frozen=True, slots=True)
class RevokeSeen:
    """A local rank found its epoch revoked."""

    rank: int
    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A local rank asks to be taken out."""

    rank: int
    incarnation: int


class Action(Enum):
    """What an operator may ask for."""

    REMOVE = "remove"
    LAUNCH = "launch"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class OperatorAsked:
    """``operation`` names the request, so that asking again after a lost answer does nothing twice."""

    operation: str
    action: Action
    rank: int


@dataclass(frozen=True, slots=True)
class EvidenceGiven:
    """Something outside says that the hardware of a local rank is not well. ``operation`` names the evidence, which counts
    once. It is about the device, and so about whichever life the rank has. ``fatal``: the rank can serve no more."""

    operation: str
    rank: int
    evidence: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class StopAsked:
    """This supervisor is to end, with all its ranks."""


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """The record as read or watched; ``version`` is the store's own and only good for compare-and-swap."""

    instance: InstanceRecord | None
    version: int


@dataclass(frozen=True, slots=True)
class Proposed:
    """The answer to the proposal of record ``serial``.

    ``committed`` is None when no answer came: it may or may not have been stored. Otherwise ``instance``
    and ``version`` are what the store held when it answered (None: nothing).
    """

    serial: int
    committed: bool | None
    instance: InstanceRecord | None = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class ReportSeen:
    """A host's report changed, or ended with its lease (None). The store's ``version`` orders what is seen of a host."""

    host: str
    report: Report | None
    version: int


@dataclass(frozen=True, slots=True)
class ReportsListed:
    """The reports in ``scope`` (one host, or ``EVERY_HOST``) as they were at the store's ``version``."""

    reports: Mapping[str, Report]
    scope: str
    version: int


@dataclass(frozen=True, slots=True)
class NewsHeard:
    """Another supervisor said this directly."""

    news: News


@dataclass(frozen=True, slots=True)
class LinksSeen:
    """To these other supervisors, and no others that are known, there is no link now."""

    down: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """The store knows this host and will tell the others if it goes silent."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """This host can no longer be sure that the store holds its lease."""


class Timer(Enum):
    JUDGE = "judge"
    NEWS = "news"
    REGROUP = "regroup"
    MAKE_DO = "make-do"
    RELAUNCH = "relaunch"
    START = "start"
    SETTLE = "settle"
    LEAVE = "leave"
    FENCE = "fence"
    STABLE = "stable"


@dataclass(frozen=True, slots=True)
class Deadline:
    """A timer that was set has run out. ``number`` is the epoch or the incarnation it was set for."""

    timer: Timer
    number: int
    rank: int = -1


Event = (
    Exited
    | PulseStopped
    | Failed
    | Stalled
    | Ready
    | Settled
    | Suspected
    | RevokeSeen
    | Leave
    | OperatorAsked
    | EvidenceGiven
    | StopAsked
    | InstanceSeen
    | Proposed
    | ReportSeen
    | ReportsListed
    | NewsHeard
    | LinksSeen
    | LeaseHeld
    | LeaseLost
    | Deadline
)
