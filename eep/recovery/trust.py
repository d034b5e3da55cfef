"""Whether what a rank computed can be trusted, by the status words of all its endpoints; and what it tells if not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from eep import faults
from eep.control.member import Member
from eep.control.planes import may_commit
from eep.data_plane.endpoint import Endpoint
from eep.data_plane.status import QuickLook
from eep.errors import StepFailed

T = TypeVar("T")


class Trust:
    """``endpoints`` are all through which a step of this rank goes. ``epoch``: that of the view that they show."""

    def __init__(self, endpoints: Sequence[Endpoint], member: Member, epoch: int) -> None:
        self._endpoints, self._member = tuple(endpoints), member
        # One look at all endpoints: finding them in memory one after the other takes longer than looking.
        self._look = QuickLook(*(endpoint.status_words for endpoint in self._endpoints))
        self.epoch = epoch

    def all_is_well(self) -> bool:
        return self._look.is_ok(self.epoch)

    def result_of(self, work: Callable[[], T]) -> tuple[T] | None:
        """The result of ``work`` if it can be trusted; None if not, after telling the supervisor."""
        try:
            result = work()
        except StepFailed:
            self.give_up()
            return None
        if self.all_is_well():
            return (result,)
        self.give_up()
        return None

    def give_up(self) -> None:
        """Tells the supervisor what this rank has seen. The next boundary waits for the view that follows."""
        faults.at("step.evidence")
        bad = [status for endpoint in self._endpoints if not (status := endpoint.status()).ok]
        if bad:
            may_commit(self._member, bad[0])
        else:
            self._member.revoked()
        faults.at("step.revoked")
