"""The step of an instance whose ranks may die at any moment: run it, check whether it can be trusted, run it again if not.

A rank goes round this loop. Every stage of it may end early because a peer was lost::

    boundary --> collect (what all ranks tell each other) --> run (the forward pass) --> commit --> boundary ...

A rank commits a step as soon as it can trust its own results; the ranks do not vote. So when an epoch ends, some ranks are
at the boundary and some have a batch that they must run again. In the next epoch each rank says which, once, before anything
else. If any rank repeats a batch, the others take part with an empty one, since every step needs all ranks. Then all ranks
are at the boundary again. A joiner begins at the boundary. A fault in the middle of this ends that epoch too, and the same
thing happens in the next: there is nothing else to recover.

A rank may do other things while its step runs (:meth:`Session.begin`): the boundary and the exchange of the next step, or
even begin that step. A bad step takes with it every step that was begun on top of it. A rank judges all of them before it
leaves their epoch. So ranks may have different steps to run again, and different numbers of them. The exchange of tokens
does not care which step a rank is in, as long as all ranks take the same passage: the same buffer, in as many portions. Each
rank repeats its oldest step: first the ranks that do so by the first passage, then those by the second, and so on until no
rank has any left.

A rank may also have agreed to a step with the others and not have begun it yet: it *owes* that step. Others may have begun it
already, and repeat it. Or the view has ranks in it that never heard of it. So a rank begins what it owes when no rank has
anything left to repeat, and those that owe nothing take part with an empty step.

The session knows nothing of SGLang: a batch is a callable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from eep import faults
from eep.control.member import Member, obey_fault_orders
from eep.control.planes import Plane, Planes
from eep.data_plane.buffer import Buffer
from eep.data_plane.endpoint import Endpoint
from eep.data_plane.passage import Passage
from eep.errors import EepError, RankRemoved, StepFailed
from eep.process_group.world import World
from eep.recovery.callbacks import Repair, RunEmpty
from eep.recovery.contract import check_peers, check_placements
from eep.recovery.intents import Intent, IntentExchange, agreed_digest, owed_passage, passages_in_order, steps_remain
from eep.recovery.trust import Trust
from eep.view import View

T = TypeVar("T")

_FIRST = Passage()


@dataclass
class _Step:
    """A step that has begun and is not judged yet."""

    passage: Passage
    again: Callable[[], Any]
    """Runs the batch once more, to its end."""
    wait: Callable[[], object]
    """Returns when the work that the batch started is over."""
    result: Any = None


@dataclass(frozen=True)
class _Repeats:
    """What the ranks do in an epoch before they are at the boundary again."""

    passages: Sequence[Passage] = ()
    """By which each rank repeats its oldest step, or takes part with an empty one."""
    owed: Passage | None = None
    """That of the step which some rank owes."""


class Session:
    """One rank's part in an instance. Make it when the rank has all it needs; the rank joins with its first boundary."""

    def __init__(
        self,
        world: World,
        buffers: Sequence[Buffer],
        repair: Repair,
        run_empty: RunEmpty,
        *,
        timeout: float = 30.0,
    ) -> None:
        """``buffers``: the passage of a step names one of them, the same on every rank. ``timeout``: how many seconds a peer
        may take to enter an epoch that all have agreed on."""
        self._buffers = tuple(buffers)
        self._repair, self._run_empty = repair, run_empty
        self._intents = IntentExchange(world, timeout)
        self._endpoints: tuple[Endpoint, ...] = (*self._buffers, *world.endpoints)
        self._digest: int | None = None
        self._epoch = -1
        """The epoch in which the ranks last exchanged their intents."""
        self._has_run = False
        self._steps: deque[_Step] = deque()
        self._has_more = False
        """Whether any rank has more steps to run again in this epoch."""
        self.repeated = 0
        """How many steps this rank has run again."""
        obey_fault_orders()
        faults.at("join.loaded")
        self.member = Member.connect(
            Planes(
                *(Plane.of(buffer) for buffer in self._buffers),
                Plane(world.endpoint, world.apply),
                # Endpoints on other devices get their view from the world; a revoke must end their waits as well.
                *(Plane(endpoint, _is_applied) for endpoint in world.endpoints[1:]),
            )
        )
        self._trust = Trust(self._endpoints, self.member, self.view.epoch)
        for endpoint in self._endpoints:
            endpoint.prepare()
        self.member.ready()
        faults.at("join.ready")

    @property
    def view(self) -> View:
        return self._buffers[0].view

    @property
    def bookkeeping(self) -> tuple[Callable[[], object], ...]:
        """What every step does because ranks may be lost. Each may be called by itself, between two steps."""
        member = self.member
        return faults.take_orders, member.advance, lambda: member.has_news, self._trust.all_is_well

    def boundary(self) -> View:
        """Between two steps: enters the newest view, if there is a new one, and returns it.

        Returns at once while nothing has changed. Raises :class:`eep.RankRemoved` when this process must end.
        """
        faults.take_orders()
        self.member.advance()
        if self._steps:
            if not self.member.has_news:
                return self.view  # the steps under way go on
            self.settle()
        self._go_on()
        return self.view

    def collect(self, gather: Callable[[], T]) -> T:
        """Passes a boundary, then returns what ``gather`` hears from all ranks before a step.

        The session calls ``gather`` until its result can be trusted. Each call must start from nothing: what an earlier one
        filled may hold answers of ranks that are gone.
        """
        while True:
            self.boundary()
            if (answer := self._trust.result_of(gather)) is not None:
                return answer[0]

    def run(self, batch: Callable[[], T], passage: Passage = _FIRST) -> T:
        """Runs a step: calls ``batch``, in as many views as it takes, until its result can be trusted.

        ``passage``: the same on every rank, each time that the batch runs.
        """
        step = self._begin(_Step(passage, batch, _nothing), batch, ahead=0)
        self.settle()
        result: T = step.result
        return result

    def begin(
        self,
        batch: Callable[[], T],
        passage: Passage = _FIRST,
        *,
        again: Callable[[], object] | None = None,
        wait: Callable[[], object] | None = None,
        ahead: int = 0,
    ) -> T:
        """Starts a step. Its result can be trusted when :meth:`settle` has returned.

        ``batch`` may only start work on a device; ``wait`` returns when that work is over. ``again`` runs the batch once
        more, to its end, with what the steps before it have made by then. ``ahead``: on top of how many steps that are not
        judged yet this one may begin.
        """
        result: T = self._begin(_Step(passage, again or batch, wait or _nothing), batch, ahead).result
        return result

    def settle(self, leave: int = 0, *, owed: Passage | None = None) -> None:
        """Judges the steps that have begun, oldest first, and repeats those that are bad.

        When this returns, all of them are over and good, except for the newest ``leave``. ``owed``: to be given between
        :meth:`collect` and :meth:`begin`, if this rank is about to begin a step; its passage.
        """
        while len(self._steps) > leave:
            self._steps[0].wait()
            if self._trust.all_is_well():
                self._hand_out(self._steps[0].result)
            else:
                self._redo(owed)

    def close(self) -> None:
        self.member.close()

    def _begin(self, step: _Step, batch: Callable[[], Any], ahead: int) -> _Step:
        self.settle(ahead, owed=step.passage)
        if not self._has_run:
            self._has_run = True
            faults.at("join.first_step")
        self._steps.append(step)
        try:
            step.result = batch()
        except StepFailed:
            self._redo()
        return step

    def _hand_out(self, result: object) -> None:
        """The oldest step is good: its caller may have the result."""
        self._steps.popleft().result = result
        faults.at("step.trusted")

    def _redo(self, owed: Passage | None = None) -> None:
        """The oldest step is bad, and so is every step that was begun on top of it."""
        for step in self._steps:
            step.wait()
        self._trust.give_up()
        self.repeated += 1
        self._go_on(owed)

    def _go_on(self, owed: Passage | None = None) -> None:
        """Enters the newest view and repeats there what this rank or its peers must run again, until all of it is good.

        ``owed``: the passage of the step that this rank begins when this returns, if it owes one.
        """
        while True:
            repeats = self._enter(owed)
            mine = self._steps[0] if self._steps else None
            for passage in repeats.passages:
                if is_mine := mine is not None and passage == mine.passage:
                    faults.at("step.again")
                    trusted = self._trust.result_of(mine.again)
                else:
                    trusted = self._trust.result_of(partial(self._run_empty, passage))
                if trusted is None:
                    self.repeated += is_mine
                    break
                if is_mine:
                    self._hand_out(trusted[0])
            else:
                if self._has_more:
                    continue
                if repeats.owed is None or owed is not None:
                    return
                if self._trust.result_of(partial(self._run_empty, repeats.owed)) is not None:
                    return

    def _enter(self, owed: Passage | None) -> _Repeats:
        """Enters the newest view together with all its ranks."""
        while True:
            view = self.member.boundary(self._repair_for)
            if view is None:
                raise RankRemoved(
                    f"{self.member.removed}; end this process: the rank may join again as a new incarnation"
                )
            if view.epoch == self._epoch and not self._steps and not self._has_more:
                return _Repeats()
            if self._digest is None:
                self.member.wait_for_view(after=view.epoch)
                continue
            faults.at("intents.before")
            heard = self._trust.result_of(partial(self._exchange_intents, owed))
            if heard is None:
                continue
            faults.at("intents.after")
            (intents,) = heard
            if not all(intent.digest for intent in intents.values()):
                self.member.wait_for_view(after=view.epoch)
                continue
            self._check(view, intents)
            if any(intent.digest != self._digest for intent in intents.values()):
                self.member.wait_for_view(after=view.epoch)  # those ranks end, each by its own check
                continue
            self._epoch = view.epoch
            self._has_more = steps_remain(intents)
            return _Repeats(passages_in_order(intents), owed_passage(intents))

    def _repair_for(self, view: View) -> None:
        """The member has applied ``view``; it says that this rank has settled when this returns."""
        self._trust.epoch = view.epoch
        if self._epoch < 0:
            faults.at("join.mapped")
        faults.at("repair.before")
        self._digest = self._repair(view)
        faults.at("routing.published")

    def _exchange_intents(self, owed: Passage | None) -> dict[int, Intent]:
        if self._digest is None:
            raise EepError("ranks exchange no intents while experts are missing; wait for the next view")
        oldest = self._steps[0].passage if self._steps else None
        return self._intents.exchange(Intent(self._digest, len(self._steps), oldest, owed))

    def _check(self, view: View, intents: Mapping[int, Intent]) -> None:
        for endpoint in self._endpoints:
            check_peers(view, endpoint.table)
        # All ranks hear the same intents, so they agree on who is wrong.
        check_placements(view, self._digest, agreed_digest(intents))


def _nothing() -> None:
    pass


def _is_applied(view: View, within: float) -> None:
    pass
