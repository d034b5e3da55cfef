"""The part of a server's status that decides about operations. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eep.operations.operation_request import RoleName

_NOT_COMING = ("down", "leaving", "stuck")


@dataclass(frozen=True, slots=True)
class RankStanding:
    """Where one rank stands: its ``status`` is that of ``eep status``."""

    status: str
    incarnation: int
    is_in: bool
    failures: int = 0
    wanted: bool = True
    """Whether it is started again when it ends."""
    role: RoleName = "both"
    requests: int = 0
    """How many open ones it serves."""
    elsewhere: bool = False
    """Whether it is on another host, whose own front end sends it requests."""

    @property
    def is_kept(self) -> bool:
        """Whether it serves, or will without an operator who asks for it."""
        return self.wanted and self.status not in _NOT_COMING


@dataclass(frozen=True, slots=True)
class InstanceStanding:
    """Where the instance stands."""

    phase: str
    ranks: Mapping[int, RankStanding] = field(default_factory=dict)
    fewest_ranks: int = 0
    """How many suffice to serve."""
    safe: tuple[int, ...] = ()
    """The ranks that could go now without a repair."""
    open_requests: int = 0
    draining: bool = False
    faults_allowed: bool = False

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> InstanceStanding:
        """From what ``eep status`` shows; a front end adds what it knows of requests."""
        margin = status.get("margin") or {}
        return cls(
            phase=status["phase"],
            ranks={
                int(number): RankStanding(
                    rank["status"],
                    rank["incarnation"],
                    rank["in"],
                    rank["failures"],
                    rank.get("wanted", True),
                    rank.get("role", "both"),
                    rank.get("requests", 0),
                    rank.get("elsewhere", False),
                )
                for number, rank in status["ranks"].items()
            },
            fewest_ranks=status.get("fewest_ranks", 0),
            safe=tuple(margin.get("ranks", ())),
            open_requests=status.get("open_requests") or 0,
            draining=bool(status.get("draining")),
            faults_allowed=bool(status.get("faults_allowed")),
        )

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(sorted(number for number, rank in self.ranks.items() if rank.is_in))

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(sorted(number for number, rank in self.ranks.items() if rank.is_kept))

    def is_last_to_serve(self, number: int) -> bool:
        """Whether a rank of this host serves requests, and no other does that is in and stays."""
        serving = [each for each, rank in self.ranks.items() if rank.role == "both" and not rank.elsewhere]
        others = (self.ranks[each] for each in serving if each != number)
        return number in serving and not any(rank.is_in and rank.is_kept for rank in others)

    @property
    def is_quiet(self) -> bool:
        """Whether no change is under way: all ranks that are to serve do, and no other does."""
        return self.phase == "RUN" and self.active == self.kept
