"""A lane: what one group calls natively. Blocks until a call is done, and raises if it cannot be trusted."""

from __future__ import annotations

import hashlib
from typing import Protocol

from eep.abi.collectives import CollectiveArgs, MessageHeader
from eep.abi.context import NativeContext
from eep.abi.peer_table import ranks_of
from eep.data_plane.status import Status
from eep.errors import EepError, EpochRevoked, StepFailed
from eep.process_group.gate import Gate
from eep.view import View

GROUP_BITS = 39


def group_id(name: str, uses: int = 0) -> int:
    """The number by which the members of a group find each other's lanes, of :data:`GROUP_BITS` bits and never 0. ``uses``:
    how many groups of that name have ended in this view."""
    text = f"{name}\0{uses}" if uses else name
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (1 << GROUP_BITS) or 1


def closed_group(group: int, epoch: int) -> int:
    """What stands for a group that its owner has closed in that epoch (``eep_group_closed``)."""
    return 1 << 63 | epoch << GROUP_BITS | group


class GroupEndpoint(Protocol):
    """What the calls of a group need of an endpoint: native calls, the view they belong to, and whether to trust it."""

    @property
    def context(self) -> NativeContext: ...

    @property
    def rank(self) -> int: ...

    @property
    def view(self) -> View: ...

    @property
    def max_ranks(self) -> int: ...

    @property
    def is_ok(self) -> bool: ...

    def status(self) -> Status: ...

    def stream(self) -> int | None: ...

    def has_left(self, rank: int) -> bool: ...

    def has_closed(self, rank: int, group: int) -> bool: ...

    def dead_peers(self) -> tuple[int, ...]: ...

    def gone_peers(self) -> tuple[int, ...]: ...


class Lane:
    """One call at a time; messages may go beside it. Ranks are those of the instance, not of the group."""

    def __init__(self, endpoint: GroupEndpoint, gate: Gate, identity: int, ranks: list[int]) -> None:
        self.ranks = ranks
        self._endpoint, self._gate, self._identity = endpoint, gate, identity
        self._context = endpoint.context
        # What was found last, and for what: it is asked for at every call, and changes with the view only.
        self._active_in: tuple[View | None, list[int], int] = None, [], 0
        self._positions_of: tuple[int, list[int], tuple[int, ...]] = 0, [], ()
        self._open = True
        self._sent = False
        """Whether a message was sent since the last call: it may be in the pipe of a rank that has died since."""
        self._number = self._context.open_lane(identity, ranks)

    @property
    def epoch(self) -> int:
        """Of the view to which a call that is made now belongs."""
        return self._endpoint.view.epoch

    def active(self) -> int:
        """The members that are in the view, as a bit mask."""
        view, ranks = self._endpoint.view, self.ranks
        if view is not self._active_in[0] or ranks is not self._active_in[1]:
            self._active_in = view, ranks, sum(1 << rank for rank in {*view.active} & {*ranks})
        return self._active_in[2]

    def positions(self, mask: int) -> tuple[int, ...]:
        """Ranks of the instance, as a bit mask, as ranks of the group."""
        known, ranks, found = self._positions_of
        if mask != known or ranks is not self.ranks:
            found = tuple(i for i, rank in enumerate(self.ranks) if mask >> rank & 1)
            self._positions_of = mask, self.ranks, found
        return found

    def grow(self, size: int) -> None:
        """Ranks were added to the instance, and belong to this group."""
        self.ranks = list(range(size))
        self._number = self._context.open_lane(self._identity, self.ranks)

    def rename(self, identity: int) -> None:
        """From now on the members look for this lane by another number. Between two views: nothing is under way."""
        self._context.close_lane(self._number)
        self._identity = identity
        self._number = self._context.open_lane(identity, self.ranks)

    def call(self, name: str, args: CollectiveArgs, timeout: float, epoch: int | None = None) -> int:
        """Runs a collective; the ranks that took part, as a bit mask. ``epoch`` is that of the view in which the call was
        made, if it had to wait for its turn since."""
        args.deadline_ns = _nanoseconds(timeout)
        self._gate.enter()
        try:
            self._check_open(name)
            if epoch is not None and epoch != self._endpoint.view.epoch:
                raise overtaken(name, epoch, self.epoch)
            if self._sent:
                self._sent = False
                self._check_none_has_died(name)
            args.lane = self._number
            self._context.collective(args)
            answered = int(args.answered.mask)
            if answered != self.active():
                raise self._failure(name, timeout)
        finally:
            self._gate.leave()
        return answered

    def send(self, epoch: int, to: int, tag: int, address: int, size: int, timeout: float) -> None:
        """Sends a message of the view of ``epoch``."""
        self._gate.enter()
        try:
            self._check_open("send")
            if epoch != self._endpoint.view.epoch:
                raise overtaken(f"send to rank {to}", epoch, self.epoch)
            self._check_member("send", to)
            if not self._context.send(self._number, to, tag, address, size, _nanoseconds(timeout)):
                raise self._failure(f"send to rank {to}", timeout, to)
            self._sent = True
            self._check_none_has_died(f"send to rank {to}")
        finally:
            self._gate.leave()

    def probe(self, epoch: int, sources: int, pokes: int, timeout: float) -> MessageHeader | None:
        """The next message of one of ``sources`` (a bit mask) in the view of ``epoch``, if one came before the wait ended."""
        self._gate.enter()
        try:
            self._check_open("recv")
            if self._endpoint.view.epoch != epoch:
                return None
            return self._context.probe(self._number, sources, pokes, _nanoseconds(timeout))
        finally:
            self._gate.leave()

    def receive(self, epoch: int, source: int, address: int, size: int, timeout: float) -> bool:
        """Takes the message of ``source`` that :meth:`probe` has shown. False if it went with the view of ``epoch``: whatever
        comes first in the next is another."""
        self._gate.enter()
        try:
            self._check_open("recv")
            if self._endpoint.view.epoch != epoch:
                return False
            if not self._context.receive(self._number, source, address, size, _nanoseconds(timeout)):
                raise self._failure(f"recv from rank {source}", timeout, source)
        finally:
            self._gate.leave()
        return True

    def left(self, ranks: int) -> int:
        """Those of ``ranks`` (a bit mask) that have left the instance or this group: they will write no more."""
        closed = closed_group(self._identity, self._endpoint.view.epoch)
        return sum(
            1 << rank
            for rank in ranks_of(ranks)
            if self._endpoint.has_left(rank) or self._endpoint.has_closed(rank, closed)
        )

    def pokes(self) -> int:
        return self._context.pokes() if self._open else 0

    def poke(self) -> None:
        """Ends the waits of :meth:`probe`, so that the thread that probes looks at what has changed."""
        if self._open:
            self._context.poke()

    def trouble(self, name: str) -> StepFailed | None:
        """Why nothing of this view can be trusted any more, if so."""
        status = self._endpoint.status()
        return None if status.ok else self._failure(name)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._context.close_lane(self._number)

    def _check_open(self, name: str) -> None:
        if not self._open:
            raise EepError(f"{name}: this process group was destroyed")

    def _check_member(self, name: str, rank: int) -> None:
        if not self.active() >> rank & 1:
            raise (
                self._failure(name)
                if not self._endpoint.is_ok
                else StepFailed(f"{name}: rank {rank} is not in the view (epoch {self._endpoint.view.epoch})", (rank,))
            )

    def _check_none_has_died(self, name: str) -> None:
        """A message goes into the pipe of a dead rank as well, and the thread that watches the peers may not have seen yet
        that one of them is dead, and the epoch with it."""
        if dead := self._endpoint.dead_peers():
            who = ", ".join(f"rank {rank} has died" for rank in dead)
            raise EpochRevoked(f"{name} cannot be trusted: {who}; run it again after the next view", dead)

    def _failure(self, name: str, timeout: float | None = None, peer: int | None = None) -> StepFailed:
        """``peer`` is the one rank that was called, if it was one."""
        status = self._endpoint.status()
        kind = EpochRevoked if status.revoked else StepFailed
        dead = self._endpoint.dead_peers()
        silent = {*status.suspects, *(() if peer is None or status.revoked else (peer,))} - {*dead}
        left = ranks_of(self.left(sum(1 << rank for rank in silent)))
        who = "".join(f"; rank {rank} has died" for rank in dead) + "".join(f"; rank {rank} has left" for rank in left)
        waited = f" (its timeout was {timeout:g} s)" if timeout is not None and silent - {*left} else ""
        cause = tuple(sorted({*dead, *silent, *status.corrupt}))
        return kind(f"{name} cannot be trusted: {status}{who}{waited}; run it again after the next view", cause)


class DeviceLane(Lane):
    """A group's calls on a GPU: launched on the current stream and not waited for, so that they can be captured.

    Whether they can be trusted is seen when the step is over (:meth:`eep.data_plane.endpoint.Endpoint.status`); here only
    what the host knows already is an error.
    """

    def call(self, name: str, args: CollectiveArgs, timeout: float, epoch: int | None = None) -> int:
        self._gate.enter()
        try:
            self._check_open(name)
            if epoch is not None and epoch != self._endpoint.view.epoch:
                raise overtaken(name, epoch, self.epoch)
            if not self._endpoint.is_ok:
                raise self._failure(name)
            args.lane = self._number
            self._context.collective(args, self._endpoint.stream())
        finally:
            self._gate.leave()
        return self.active()

    def poke(self) -> None:
        """There are no messages on a GPU."""


def overtaken(name: str, epoch: int, now: int) -> EpochRevoked:
    """What ends a call that was made in a view and did not run before the next: there it would meet another of theirs."""
    return EpochRevoked(f"{name} was called in epoch {epoch}, which ended before it ran; run it again in epoch {now}")


def _nanoseconds(seconds: float) -> int:
    return max(1, int(seconds * 1e9))
