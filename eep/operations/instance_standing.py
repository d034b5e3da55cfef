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

    @property
    def is_kept(self) -> bool:
        """Whether it serves, or will without an operator who asks for it."""
        return self.wanted and self.status not in _NOT_COMING


@dataclass(frozen=True, slots=True)
class InstanceStanding:
    """Where the instance stands, as its host sees it."""

    phase: str
    ranks: Mapping[int, RankStanding] = field(default_factory=dict)
    """Those of this host."""
    elsewhere: int | None = None
    """How many ranks of other hosts are in; None where there is one host."""
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
                )
                for number, rank in status["ranks"].items()
            },
            elsewhere=None if status.get("links") is None else sum(map(len, status["other_hosts"].values())),
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
    def needed(self) -> int:
        """How many ranks of this host it takes to serve, with those of other hosts that are in."""
        return max(1, self.fewest_ranks - (self.elsewhere or 0))

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(sorted(number for number, rank in self.ranks.items() if rank.is_kept))

    def is_last_to_serve(self, number: int) -> bool:
        """Whether a rank of this host serves requests, and no other does that is in and stays."""
        serving = [each for each, rank in self.ranks.items() if rank.role == "both"]
        others = (self.ranks[each] for each in serving if each != number)
        return number in serving and not any(rank.is_in and rank.is_kept for rank in others)

    @property
    def is_quiet(self) -> bool:
        """Whether no change is under way: all ranks that are to serve do, and no other does."""
        return self.phase == "RUN" and self.active == self.kept
