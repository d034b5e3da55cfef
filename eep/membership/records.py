"""The two records that hosts share through the store: the instance, and one report per host.

Plain frozen dataclasses: the core needs nothing beyond the standard library, and the wire can encode them
as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from eep.view import NEVER, View


class Phase(Enum):
    """How far the committed view has got."""

    AGREED = "agreed"
    """The view is committed; its ranks repair, and none may run a step yet."""
    RUN = "run"
    """Every rank of the view has settled: steps may run."""


class Life(Enum):
    """What a host says about one of its ranks."""

    WANTED = "wanted"
    """No process; the host asks for leave to launch one."""
    STARTING = "starting"
    READY = "ready"
    """Alive and able to take part; being *in* is for the view to say."""
    LEAVING = "leaving"
    """Alive, and asks to be taken out."""
    FENCING = "fencing"
    """Killed, but its exit has not been seen: it counts as alive until it has."""
    RESTING = "resting"
    """Dead; the host will ask for leave to launch it again in a while."""
    DOWN = "down"
    """No process, or one that even SIGKILL does not end; none is asked for."""

    @property
    def alive(self) -> bool:
        return self in _ALIVE


_ALIVE = frozenset({Life.STARTING, Life.READY, Life.LEAVING, Life.FENCING})


@dataclass(frozen=True, slots=True)
class Accusation:
    """``accuser`` waited for ``suspect`` past its deadline, in ``epoch``."""

    epoch: int
    accuser: int
    suspect: int
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank as its host sees it."""

    life: Life
    incarnation: int = NEVER


@dataclass(frozen=True, slots=True)
class Report:
    """What one host sees.

    ``settled`` is the last epoch that *all* its ranks in the view have applied and repaired: one word per
    host, so that a view change costs one report per host and not one per rank. ``revoked`` is the highest
    epoch in which its ranks can no longer finish a step; a new epoch must follow, even when no rank died.
    """

    ident: str
    ranks: Mapping[int, RankReport] = field(default_factory=dict)
    settled: int = -1
    revoked: int = -1
    accusations: tuple[Accusation, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """The one committed record. ``serial`` counts its changes; ``view.epoch`` counts the views.

    ``owners[r]`` is the supervisor that may launch rank ``r`` and ``granted[r]`` the last incarnation it
    was given leave for, so that two supervisors can never run the same incarnation. ``condemned`` are ranks
    of this view that their owners must fence: a verdict is not a removal, the exit that follows it is.
    """

    serial: int
    view: View
    phase: Phase
    coordinator: str
    owners: tuple[str, ...]
    granted: tuple[int, ...]
    condemned: tuple[int, ...] = ()
    reason: str = ""

    @classmethod
    def founded(cls, coordinator: str, max_ranks: int) -> InstanceRecord:
        """The first record of a job: no rank is in yet."""
        return cls(
            1,
            View.empty(max_ranks),
            Phase.RUN,
            coordinator,
            ("",) * max_ranks,
            (NEVER,) * max_ranks,
            reason=f"founded by {coordinator}",
        )

    def has(self, rank: int, incarnation: int) -> bool:
        """Whether exactly this incarnation is in."""
        return rank in self.view.active and self.view.incarnations[rank] == incarnation


def host_of(ident: str) -> str:
    """The host part of a supervisor's ident, ``host#nonce``."""
    return ident.partition("#")[0]
