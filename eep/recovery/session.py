"""The step of an instance whose ranks may die at any moment: run it, look whether it can be trusted, run it again if not.

A rank goes round this loop, in which everything may end early because a peer was lost::

    boundary --> collect (what all ranks tell each other) --> run (the forward pass) --> commit --> boundary ...

It commits a step as soon as it can trust its own results; nobody votes. So when an epoch ends, some ranks are at the
boundary and some have a batch that must be run again. In the next epoch each says which, once, before anything else; if
anybody runs a batch again, the others take part with an empty one, since every step needs all ranks. Then all are at the
boundary again. A rank that joins begins at the boundary. A fault in the middle of this is the end of that epoch too, and
the same thing happens in the next: there is nothing else to recover.

A rank may do other things while its step runs (:meth:`Session.begin`), the boundary and the exchange of the next among
them, and may even begin the next: a step that is bad takes those down with it that were begun on top of it. All of them are
judged before their epoch is left. So ranks may have different steps to run again, and different numbers of them. To the
exchange of tokens it is all one which step a rank is in, as long as all go through the same buffer: each runs its oldest
again, first those who do so through the first buffer, then those through the second, and so on until nobody has any left.

Knows nothing of SGLang: a batch is a callable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from eep import faults
from eep.control.member import Member, obey_fault_orders
from eep.control.planes import Plane, Planes, may_commit
from eep.data_plane.buffer import Buffer
from eep.data_plane.endpoint import Endpoint
from eep.data_plane.status import QuickLook
from eep.errors import EepError, RankRemoved, StepFailed
from eep.process_group.world import World
from eep.recovery.contract import ContractBroken, check_peers
from eep.recovery.intents import Intents, Word, buffers_in_order, somebody_has_more
from eep.view import View

T = TypeVar("T")

Repair = Callable[[View], int | None]
"""Makes every expert available in a view. Returns a number that all ranks of the view must agree on (the digest of the
placement), or None when the ranks that are left cannot hold all experts, as all of them see: then nothing runs until others
have come. 0 says that this rank alone could not do its part: it tells the others, and all wait for the next view."""

RunEmpty = Callable[[int], object]
"""A step without tokens, through the buffer of that number."""


@dataclass
class _Step:
    """One that has begun and is not judged yet."""

    buffer: int
    again: Callable[[], Any]
    """Runs the batch once more, to its end."""
    wait: Callable[[], object]
    """Until what was started is over."""
    result: Any = None


class Session:
    """One rank's part in an instance. Made when the rank has all it needs; it joins with the first boundary."""

    def __init__(
        self,
        world: World,
        buffers: Sequence[Buffer],
        repair: Repair,
        run_empty: RunEmpty,
        *,
        timeout: float = 30.0,
    ) -> None:
        """``buffers``: those of a step, each of which uses one of them, the same on every rank. ``timeout``: how many
        seconds a peer may take to enter an epoch that all have agreed on."""
        self._buffers = tuple(buffers)
        self._repair, self._run_empty = repair, run_empty
        self._intents = Intents(world, timeout)
        self._endpoints: tuple[Endpoint, ...] = (*self._buffers, *world.endpoints)
        # One look at all of them: to find one endpoint after the other in memory takes longer than to look.
        self._look = QuickLook(*(endpoint.status_words for endpoint in self._endpoints))
        self._shown = self.view.epoch
        """The epoch of the view that all endpoints show."""
        self._digest: int | None = None
        self._epoch = -1
        """That of the view in which all have told each other what they will do."""
        self._has_run = False
        self._steps: deque[_Step] = deque()
        self._has_more = False
        """Whether somebody has more to run again in this epoch."""
        self.repeated = 0
        """How many steps were run again."""
        obey_fault_orders()
        faults.at("join.loaded")
        self.member = Member.connect(
            Planes(
                *(Plane.of(buffer) for buffer in self._buffers),
                Plane(world.endpoint, world.apply),
                # Those on other devices have their view from the world; here it is their waits that must be ended.
                *(Plane(endpoint, _is_applied) for endpoint in world.endpoints[1:]),
            )
        )
        for endpoint in self._endpoints:
            endpoint.prepare()
        self.member.ready()
        faults.at("join.ready")

    @property
    def view(self) -> View:
        return self._buffers[0].view

    def boundary(self) -> View:
        """Between two steps: enters the newest view, if there is a new one.

        Returns at once while nothing has changed. Raises :class:`eep.RankRemoved` when this process must end.
        """
        faults.look()
        if self._steps:
            if not self.member.has_news:
                return self.view  # and what is under way stays so
            self.settle()
        self._go_on()
        return self.view

    def collect(self, gather: Callable[[], T]) -> T:
        """A boundary, and then what all ranks tell each other before a step.

        ``gather`` is called as often as it takes, each time with nothing left of the last: what it fills may hold words of
        ranks that have gone since.
        """
        while True:
            self.boundary()
            if (answer := self._trusts(gather)) is not None:
                return answer[0]

    def run(self, batch: Callable[[], T], buffer: int = 0) -> T:
        """A step: runs ``batch``, in as many views as it takes, until its result can be trusted.

        ``buffer`` is the number of the buffer that it uses.
        """
        step = self._begin(_Step(buffer, batch, _nothing), batch, ahead=0)
        self.settle()
        result: T = step.result
        return result

    def begin(
        self,
        batch: Callable[[], T],
        buffer: int = 0,
        *,
        again: Callable[[], object] | None = None,
        wait: Callable[[], object] | None = None,
        ahead: int = 0,
    ) -> T:
        """Starts a step. :meth:`settle` says when its result can be trusted.

        ``batch`` may only start work on a device; ``wait`` is until that is over. ``again`` runs the batch once more, with
        what the steps before it have made by then, and does not return before that is over. ``ahead``: on top of how many
        steps that nobody has judged yet it may begin.
        """
        result: T = self._begin(_Step(buffer, again or batch, wait or _nothing), batch, ahead).result
        return result

    def settle(self, leave: int = 0) -> None:
        """When this returns, all steps that have begun are over and good, but for the newest ``leave`` of them."""
        while len(self._steps) > leave:
            self._steps[0].wait()
            if self._all_is_well():
                self._hand_out(self._steps[0].result)
            else:
                self._redo()

    def close(self) -> None:
        self.member.close()

    def _begin(self, step: _Step, batch: Callable[[], Any], ahead: int) -> _Step:
        self.settle(ahead)
        if not self._has_run:
            self._has_run = True
            faults.at("join.first_step")
        self._steps.append(step)
        try:
            step.result = batch()
        except StepFailed:
            self._redo()
        return step

    def _trusts(self, work: Callable[[], T]) -> tuple[T] | None:
        """The result of ``work``, if it can be trusted. If not, the supervisor knows."""
        try:
            result = work()
        except StepFailed:
            self._give_up()
            return None
        if self._all_is_well():
            return (result,)
        self._give_up()
        return None

    def _all_is_well(self) -> bool:
        return self._look.is_ok(self._shown)

    def _give_up(self) -> None:
        """Tells the supervisor what this rank has seen; the next boundary waits for what it makes of it."""
        faults.at("step.evidence")
        bad = [status for endpoint in self._endpoints if not (status := endpoint.status()).ok]
        if bad:
            may_commit(self.member, bad[0])
        else:
            self.member.revoked()
        faults.at("step.revoked")

    def _hand_out(self, result: object) -> None:
        """The oldest step is good."""
        self._steps.popleft().result = result
        faults.at("step.trusted")

    def _redo(self) -> None:
        """The oldest step is bad, and so is whatever was begun on top of it."""
        for step in self._steps:
            step.wait()
        self._give_up()
        self.repeated += 1
        self._go_on()

    def _go_on(self) -> None:
        """Into the newest view, and whatever is to be run again there, by this rank or by others, until all of it is good."""
        while True:
            buffers = self._enter()
            mine = self._steps[0] if self._steps else None
            for buffer in buffers:
                if is_mine := mine is not None and buffer == mine.buffer:
                    faults.at("step.again")
                    trusted = self._trusts(mine.again)
                else:
                    trusted = self._trusts(partial(self._run_empty, buffer))
                if trusted is None:
                    self.repeated += is_mine
                    break
                if is_mine:
                    self._hand_out(trusted[0])
            else:
                if not self._has_more:
                    return

    def _enter(self) -> list[int]:
        """Into the newest view, together with everybody. Returns the buffers through which steps are run again, in order."""
        while True:
            view = self.member.boundary(self._settle)
            if view is None:
                raise RankRemoved(
                    f"{self.member.removed}; this process must end, and may come back as a new incarnation"
                )
            if view.epoch == self._epoch and not self._steps and not self._has_more:
                return []
            if self._digest is None:
                self.member.wait_for_view(after=view.epoch)
                continue
            faults.at("intents.before")
            words = self._trusts(self._exchange)
            if words is None:
                continue
            faults.at("intents.after")
            if not all(word.digest for word in words[0].values()):
                self.member.wait_for_view(after=view.epoch)
                continue
            self._check(view, words[0])
            self._epoch = view.epoch
            self._has_more = somebody_has_more(words[0])
            return buffers_in_order(words[0])

    def _settle(self, view: View) -> None:
        self._shown = view.epoch
        if self._epoch < 0:
            faults.at("join.mapped")
        faults.at("repair.before")
        self._digest = self._repair(view)
        faults.at("routing.published")

    def _exchange(self) -> dict[int, Word]:
        if self._digest is None:
            raise EepError("nothing runs while experts are missing")
        oldest = self._steps[0].buffer if self._steps else None
        return self._intents.exchange(Word(self._digest, len(self._steps), oldest))

    def _check(self, view: View, words: dict[int, Word]) -> None:
        for endpoint in self._endpoints:
            check_peers(view, endpoint.table)
        others = {rank: word.digest for rank, word in words.items() if word.digest != self._digest}
        if others:
            raise ContractBroken(
                "graph-visible routing", f"ranks {sorted(others)} have made another placement of view {view.epoch}"
            )


def _nothing() -> None:
    pass


def _is_applied(view: View, within: float) -> None:
    pass
