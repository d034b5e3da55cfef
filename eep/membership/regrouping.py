"""When an empty instance begins: with all ranks that are coming, or, after a loss of all, with those that suffice.

An instance that lost every rank would rather begin once, with all of them, than rank by rank. But one that hangs while it
starts must not keep the others from serving. So there are two waits, and each has an end:

* ranks that are *enough* to serve as before wait for the others for a moment;
* ranks that are fewer, and could serve only in part, wait for much longer: the others were started together with them and
  are back in seconds, and what is served in part is worse than what is served late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eep.membership.events import Timer
from eep.membership.records import InstanceRecord, Life, Report

_ON_THE_WAY = (Life.WANTED, Life.STARTING)
_LATER = (Life.RESTING, Life.FENCING)


@dataclass(frozen=True, slots=True)
class Regrouping:
    """How many ranks suffice after a loss of all, and in which empty epochs they have waited for the others."""

    fewest: int = 0
    """As few can serve, if only in part; 0: not known."""
    enough: int = 0
    """As many serve as before; less than ``fewest``: that many are enough."""
    regrouped: int = -1
    made_do: int = -1

    def wait(self, instance: InstanceRecord, reports: Mapping[str, Report]) -> Timer | None:
        """What those that are ready wait for while others are on their way; None if they cannot serve, or need not wait."""
        view = instance.view
        if view.active or view.epoch == 0 or self.fewest < 1:
            return None
        ready = len(joining(instance, reports))
        if ready >= max(self.fewest, self.enough):
            return Timer.REGROUP if _any_is(reports, *_ON_THE_WAY) else None
        # Ranks that are enough need not wait for one that has yet to end, or rests after a failure. Others do.
        is_awaited = ready >= self.fewest and _any_is(reports, *_ON_THE_WAY, *_LATER)
        return Timer.MAKE_DO if is_awaited else None

    def must_wait(self, instance: InstanceRecord, reports: Mapping[str, Report]) -> bool:
        """Whether an empty instance stays empty for now."""
        wait, epoch = self.wait(instance, reports), instance.view.epoch
        if wait is None:
            return _any_is(reports, *_ON_THE_WAY)
        return epoch != self.made_do and not (wait is Timer.REGROUP and epoch == self.regrouped)


def joining(instance: InstanceRecord, reports: Mapping[str, Report]) -> dict[int, int]:
    """The incarnations of the ranks that are ready to come in."""
    return {
        rank: told.incarnation
        for report in reports.values()
        for rank, told in report.ranks.items()
        if told.life is Life.READY and told.incarnation == instance.granted[rank] > instance.view.incarnations[rank]
    }


def _any_is(reports: Mapping[str, Report], *lives: Life) -> bool:
    return any(told.life in lives for report in reports.values() for told in report.ranks.values())
