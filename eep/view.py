"""A view: which ranks are in the instance, as of one epoch.

A view is a value. It never changes; membership changes by replacing one view with another of a higher epoch. The
data plane applies views, the control plane commits them, and both talk about them in this type. It is a plain
dataclass so that the data plane needs nothing beyond the standard library and torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NEVER = -1
"""The incarnation of a rank that has never been part of the instance."""
FOREVER = 2**62
"""Revoking this epoch revokes every epoch there will ever be."""


@dataclass(frozen=True, slots=True)
class View:
    """The ranks that are in at ``epoch``, and the last incarnation seen of every rank.

    ``active`` is in ascending order and may have holes. ``incarnations`` is indexed by rank and as long as the
    capacity of the instance; a rank that was removed keeps its number, so that it can never come back as itself.
    """

    epoch: int
    active: tuple[int, ...]
    incarnations: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise ValueError(f"the epoch of a view cannot be negative, got {self.epoch}")
        if list(self.active) != sorted(set(self.active)):
            raise ValueError(f"active ranks must be distinct and ascending, got {self.active}")
        for rank in self.active:
            if not 0 <= rank < len(self.incarnations):
                raise ValueError(f"rank {rank} is outside the capacity of {len(self.incarnations)} ranks")
            if self.incarnations[rank] == NEVER:
                raise ValueError(f"rank {rank} is active but has no incarnation")

    @classmethod
    def empty(cls, max_ranks: int) -> View:
        """The view before any rank has joined."""
        return cls(0, (), (NEVER,) * max_ranks)

    @property
    def max_ranks(self) -> int:
        return len(self.incarnations)

    def without(self, ranks: Iterable[int], *, epoch: int | None = None) -> View:
        """The next view, with ``ranks`` removed."""
        gone = set(ranks)
        return View(
            self.epoch + 1 if epoch is None else epoch,
            tuple(rank for rank in self.active if rank not in gone),
            self.incarnations,
        )

    def joined_by(self, incarnations: Mapping[int, int], *, epoch: int | None = None) -> View:
        """The next view, with each ``rank: incarnation`` in.

        A rank joins with a higher incarnation than any it had before; the active one may be named again as it is.
        """
        known = list(self.incarnations)
        for rank, incarnation in incarnations.items():
            if not 0 <= rank < len(known):
                raise ValueError(f"rank {rank} is outside the capacity of {len(known)} ranks")
            stays = rank in self.active and incarnation == known[rank]
            if incarnation <= known[rank] and not stays:
                raise ValueError(
                    f"incarnation {incarnation} of rank {rank} is stale: incarnation {known[rank]} was already part "
                    "of the instance; relaunch the rank to get a new one"
                )
            known[rank] = incarnation
        active = tuple(sorted({*self.active, *incarnations}))
        return View(self.epoch + 1 if epoch is None else epoch, active, tuple(known))
