"""Does what the core asks for: each effect goes to the part of the supervisor whose it is."""

from __future__ import annotations

from collections.abc import Callable

from eep import faults
from eep.control.launch.processes import Processes
from eep.control.store.store_driver import StoreDriver
from eep.control.supervisor.front_desk import FrontDesk
from eep.control.supervisor.journal import Journal
from eep.control.supervisor.timers import DeadlineTimers
from eep.control.wire.messages import ControlMessage
from eep.membership import (
    Effect,
    Fence,
    Launch,
    ListReports,
    Notify,
    Propose,
    Publish,
    RankGone,
    Reject,
    Revoke,
    SetTimer,
    Transition,
)
from eep.view import View


class EffectCarrier:
    """``standing``: the epoch, and what ranks are to be told. ``committed``: the view of the record, if there is one."""

    def __init__(
        self,
        front_desk: FrontDesk,
        processes: Processes,
        driver: StoreDriver,
        timers: DeadlineTimers,
        journal: Journal,
        *,
        standing: Callable[[], tuple[int, ControlMessage | None]],
        committed: Callable[[], View | None],
        reject: Callable[[str, str], None],
    ) -> None:
        self._front_desk, self._processes, self._driver = front_desk, processes, driver
        self._timers, self._journal = timers, journal
        self._standing, self._committed, self._reject = standing, committed, reject

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Revoke():
                faults.at("supervisor.evidence")
                self._front_desk.revoke(effect.epoch, effect.reason)
            case Propose():
                self._pass_points_of(effect.instance.view)
                self._driver.propose(effect)
            case Publish():
                self._driver.publish(effect.report)
            case ListReports():
                self._driver.list_reports()
            case Fence():
                self._front_desk.end_waits(effect.rank, effect.incarnation)
                self._processes.fence(effect.rank, effect.incarnation)
            case Launch():
                faults.at("supervisor.before_launch")
                self._processes.launch(effect.rank, effect.incarnation)
            case Notify():
                faults.at("supervisor.before_notify")
                epoch, message = self._standing()
                if message is not None:
                    self._front_desk.tell(message, epoch)
            case SetTimer():
                self._timers.set(effect)
            case Reject():
                self._reject(effect.kind, effect.reason)
            case RankGone():
                self._front_desk.tell_gone(effect, self._standing()[0])
            case Transition():
                self._journal.transition(effect)

    def _pass_points_of(self, proposed: View) -> None:
        committed = self._committed()
        if committed is None or proposed.epoch == committed.epoch:
            return  # the same ranks: another phase of the same view, or permission to launch
        admits = set(proposed.active) - set(committed.active)
        faults.at("supervisor.before_admit" if admits else "supervisor.before_commit")
