"""Which ranks are in, as the front end knows it, and which of them take requests. Pure.

A rank that serves experts only is in like any other: it takes part in every step, with a batch that is empty. Its role
belongs to its number, so its next life has it too.
"""

from __future__ import annotations

from collections.abc import Mapping

from eep.operations.operation_request import RoleName


class ServingRanks:
    """``live``: the incarnation of each rank that is in. ``serving``: the same of those that take requests."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.serving: dict[int, int] = {}
        self.has_view = False
        """Whether it is known who is in; not so at the very start."""
        self._gone: dict[int, int] = {}
        self._experts_only: set[int] = set()

    @property
    def experts_only(self) -> tuple[int, ...]:
        """The ranks that serve experts only, whether they are in or not."""
        return tuple(sorted(self._experts_only))

    def role_of(self, rank: int) -> RoleName:
        return "experts" if rank in self._experts_only else "both"

    def set_role(self, rank: int, role: RoleName) -> None:
        if role == "experts":
            self._experts_only.add(rank)
        else:
            self._experts_only.discard(rank)
        self._choose()

    def enter(self, lives: Mapping[int, int]) -> int:
        """A view has these incarnations. Returns how many that were in are not any more."""
        before, self.has_view = self.live, True
        self.live = {rank: life for rank, life in lives.items() if self._gone.get(rank, -1) < life}
        self._choose()
        return sum(self.live.get(rank) != life for rank, life in before.items())

    def lose(self, rank: int, life: int) -> bool:
        """That incarnation has ended, whatever views say. Whether it was in."""
        self._gone[rank] = max(life, self._gone.get(rank, -1))
        was_in = self.live.get(rank) == life
        if was_in:
            del self.live[rank]
            self._choose()
        return was_in

    def _choose(self) -> None:
        self.serving = {rank: life for rank, life in self.live.items() if rank not in self._experts_only}
