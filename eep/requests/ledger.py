"""The ledger of accepted requests: which rank serves each, what its client has received, and how it goes on elsewhere.

The ledger is pure bookkeeping: no I/O, no clock (the caller gives the times), nothing of any serving engine. The caller,
which owns the sockets, tells it what happened and does what it answers.

- A request is on one rank at a time, and has a new *wire id* for each life there. Output under an older wire id
  comes late from a rank that was given up, and the ledger drops it.
- When a rank is lost its requests are replayed with all delivered tokens, once, however often they move. The caller keeps
  what it was sent, and with it the prompt. With :attr:`ReplayManner.RESUME` the next rank is told what was delivered and
  goes on from there. With :attr:`ReplayManner.RESTART` it begins anew and the ledger withholds what it repeats. That is for
  requests whose output is more than tokens and their log-probabilities.
- A finished request never moves. An aborted one is never replayed; its client gets an answer instead.
- A request that was sent to a rank and did not reach it is sent again, once the caller has waited long enough.
- A request goes to the rank that has the least to do (:mod:`eep.requests.rank_loads`).
- A request that no rank can serve waits, in order of acceptance, until the caller says that it waited too long.
- A request that may be what ends ranks is served apart, and then given up (:mod:`eep.requests.blame`).

In both manners the text of a life counts from its first output token. So the ledger cuts off what a client already has
by length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from eep.requests.blame import FAILED_TWICE, LOST_OFTEN, Blame
from eep.requests.rank_loads import Measure, RankLoads
from eep.requests.receipts import Receipts
from eep.requests.request_records import (
    Counts,
    Delivery,
    LedgerEntry,
    LossOutcome,
    Replay,
    ReplayManner,
    Request,
    RequestState,
)
from eep.requests.waiting_line import WaitingLine
from eep.requests.withheld_output import diverges, withhold


class Ledger:
    """All open requests of a server. See the module for its rules."""

    def __init__(self, measure: Measure = Measure.REQUESTS) -> None:
        """``measure``: by what a request that has not moved is given to a rank."""
        self._entries: dict[str, LedgerEntry] = {}
        self._wires: dict[str, LedgerEntry] = {}
        self._line = WaitingLine()
        self._receipts = Receipts()
        self._loads, self._measure = RankLoads(), measure
        self._blame = Blame()
        self._accepted = 0
        self.moved = 0
        self.delivered_tokens = 0
        """How many tokens clients have been sent."""
        self.dropped = 0
        """How many outputs belonged to no open life: they came late, or their request was never accepted."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def entry(self, request_id: str) -> LedgerEntry:
        try:
            return self._entries[request_id]
        except KeyError:
            raise KeyError(f"request {request_id!r} is not open; it has ended, or was never accepted") from None

    # What happens to a request.

    def accept(self, request: Request, now: float) -> LedgerEntry:
        """A client sent a request. It waits until it is assigned to a rank."""
        if request.id in self._entries:
            raise ValueError(f"request {request.id!r} is open already; ids must be distinct, choose another")
        if request.id in self._wires:
            raise ValueError(f"request {request.id!r} has the wire id of another request; choose another id")
        self._accepted += 1
        entry = LedgerEntry(request, now, self._accepted, waiting_since=now)
        self._entries[request.id] = self._wires[entry.wire] = entry
        self._line.add(entry)
        return entry

    def assigned(self, request_id: str, rank: int, incarnation: int, now: float = 0.0) -> None:
        """The caller has sent a request to a rank, which is to say that it received it."""
        entry = self.entry(request_id)
        if entry.state is not RequestState.WAITING:
            raise ValueError(f"request {request_id!r} is {entry.state.value}; only a waiting request can be assigned")
        entry.state, entry.rank, entry.incarnation = RequestState.RUNNING, rank, incarnation
        self._line.remove(entry)
        self._receipts.expect(entry, now)
        self._loads.add(rank, entry.tokens)
        self._blame.assigned(entry)

    def received(self, wire: str) -> None:
        """A rank says that a request has reached it. Output says so too."""
        self._receipts.forget(wire)

    def delivered(
        self, wire: str, tokens: Sequence[int], counts: Counts, *, text: str = "", finished: bool = False
    ) -> Delivery | None:
        """A rank sent output. Returns None when it came late: the client must not see it."""
        entry = self._wires.get(wire)
        if entry is None or entry.state is RequestState.WAITING:
            self.dropped += 1
            return None
        self._receipts.forget(wire)
        if entry.first_counts is None:
            entry.first_counts = counts
        new, repeated = tuple(tokens), 0
        if entry.moves:
            if diverges(entry, new):
                self._forget(entry)
                return Delivery(entry.request.id, (), "", entry.first_counts, len(new), diverged=True)
            new, text, repeated = withhold(entry, new, text)
        if new:
            self._blame.cleared(entry)
        entry.delivered += new
        self.delivered_tokens += len(new)
        self._loads.grow(entry.rank, len(new))
        entry.text_length += len(text)
        if entry.moves:
            counts = entry.first_counts._replace(completion=len(entry.delivered))
        if finished:
            self._forget(entry)
        return Delivery(entry.request.id, new, text, counts, repeated)

    def abort(self, request_id: str) -> bool:
        """The client wants no more. True when a rank will answer the client; False when the caller must, now."""
        entry = self._entries.get(request_id)
        if entry is None:
            return True  # it has ended, and its client was answered then
        if entry.state is RequestState.WAITING:
            self._forget(entry)
            return False
        entry.state = RequestState.ABORTING
        return True

    def ended(self, request_id: str) -> None:
        """A request is over, for whatever reason. A second call does nothing."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._forget(entry)

    def id_of(self, wire: str) -> str | None:
        """The request whose current life has this wire id; None for a life that is over."""
        entry = self._wires.get(wire)
        return None if entry is None or entry.state is RequestState.WAITING else entry.request.id

    # What happens to ranks.

    def rank_lost(self, rank: int, incarnation: int, now: float, *, failed: bool = False) -> LossOutcome:
        """The requests of a lost rank wait for another, under new wire ids. A second call does nothing. ``failed``: an
        exception ended the rank."""
        lost = [e for e in self._entries.values() if (e.rank, e.incarnation) == (rank, incarnation)]
        harmful = self._blame.rank_lost((rank, incarnation), lost, now, failed=failed)
        for entry in harmful:
            self._forget(entry)
        outcome = self._lose([e for e in lost if e.request.id in self._entries], now)
        return replace(outcome, harmful=(*outcome.harmful, *((e.request.id, FAILED_TWICE) for e in harmful)))

    def keep_only(self, live: Mapping[int, int], now: float) -> LossOutcome:
        """Treats every rank that is not in ``live`` (rank to incarnation) as lost."""
        return self._lose([e for e in self._entries.values() if live.get(e.rank) != e.incarnation], now)

    def output_lost(self, now: float) -> LossOutcome:
        """Output of any rank may be lost on its way here. So every request that a rank serves goes on from what its client
        has, under a new wire id. The caller tells the ranks to stop what they serve, before it sends anything again."""
        return self._lose(list(self._entries.values()), now, rank_is_gone=False)

    def unreceived(self, now: float, limit: float) -> list[str]:
        """The wire ids of requests that did not reach their ranks ``limit`` seconds after they were sent.
        The caller tells the ranks not to begin them, and calls :meth:`taken_back`."""
        return [entry.wire for entry in self._receipts.overdue(now, limit)]

    def movable(self, rank: int) -> list[str]:
        """The wire ids of the requests that a rank serves, and that another could go on with. The caller tells the rank to
        stop them, and calls :meth:`taken_back`."""
        served = [entry for entry in self._entries.values() if entry.rank == rank]
        return [
            entry.wire
            for entry in served
            if entry.state is RequestState.RUNNING and not entry.request.immovable and entry.remaining != 0
        ]

    def taken_back(self, wires: Iterable[str], now: float) -> LossOutcome:
        """These requests wait for a rank again, under new wire ids: what their ranks still make of them is late."""
        return self._lose([self._wires[wire] for wire in wires], now, rank_is_gone=False)

    @property
    def has_unreceived(self) -> bool:
        return len(self._receipts) > 0

    @property
    def loads(self) -> RankLoads:
        """What each rank has to do."""
        return self._loads

    def rank_for(self, request_id: str, active: Collection[int]) -> int | None:
        """The rank of ``active`` that a waiting request is to be sent to; None when it has to wait on. A doubted one goes
        to no rank that has another, and other requests do so only where they must."""
        apart = self._blame.apart(active)
        entry = self.entry(request_id)
        measure = Measure.TOKENS if entry.moves else self._measure
        return self._loads.least(apart if apart or entry.is_doubted else active, measure)

    # What waits.

    @property
    def has_waiting(self) -> bool:
        return len(self._line) > 0

    @property
    def waiting_count(self) -> int:
        return len(self._line)

    def waiting(self) -> list[str]:
        """The requests that no rank has, in order of acceptance, for when other ranks are in than before."""
        return self._line.in_order()

    def held_back(self, active: Collection[int]) -> str | None:
        """The first doubted request that waits, once a rank of ``active`` serves no other such."""
        return self._line.first_doubted() if self._blame.apart(active) else None

    def replay_of(self, request_id: str) -> Replay:
        """How the caller sends a waiting request."""
        entry = self.entry(request_id)
        if entry.state is not RequestState.WAITING:
            raise ValueError(f"request {request_id!r} is {entry.state.value}; only a waiting request can be sent")
        return entry.replay

    def give_up(self, now: float, limit: float) -> list[str]:
        """Forgets the requests that have waited for ``limit`` seconds; the caller tells their clients to try again."""
        overdue = self._line.overdue(now, limit)
        for entry in overdue:
            self._forget(entry)
        return [entry.request.id for entry in overdue]

    # Details.

    def _forget(self, entry: LedgerEntry) -> None:
        del self._entries[entry.request.id]
        del self._wires[entry.wire]
        if entry.state is RequestState.WAITING:
            self._line.remove(entry)
        else:
            self._leave(entry)

    def _leave(self, entry: LedgerEntry) -> None:
        """Its rank no longer serves it."""
        self._receipts.forget(entry.wire)
        self._loads.remove(entry.rank, entry.tokens)
        self._blame.left(entry)

    def _lose(self, entries: Iterable[LedgerEntry], now: float, *, rank_is_gone: bool = True) -> LossOutcome:
        replays: list[Replay] = []
        aborted: list[str] = []
        complete: list[str] = []
        failed: list[tuple[str, str]] = []
        harmful: list[tuple[str, str]] = []
        for entry in entries:
            if entry.state is RequestState.WAITING:
                continue
            if entry.state is RequestState.ABORTING:
                self._forget(entry)
                aborted.append(entry.request.id)
            elif entry.request.immovable:
                self._forget(entry)
                failed.append((entry.request.id, entry.request.immovable))
            elif entry.remaining == 0 and entry.delivered:
                self._forget(entry)
                complete.append(entry.request.id)
            elif self._blame.seems_to_end_ranks(entry):
                self._forget(entry)
                harmful.append((entry.request.id, LOST_OFTEN.format(count=entry.fruitless_moves + 1)))
            else:
                self._move(entry, now, rank_is_gone=rank_is_gone)
                replays.append(entry.replay)
        return LossOutcome(tuple(replays), tuple(aborted), tuple(complete), tuple(failed), tuple(harmful))

    def _move(self, entry: LedgerEntry, now: float, *, rank_is_gone: bool) -> None:
        self._leave(entry)
        self._blame.moved(entry)
        if rank_is_gone and (entry.last_life is None or entry.has_token_of_rank):  # else an earlier one has more of it
            entry.last_life = (entry.rank, entry.incarnation, entry.wire)
        del self._wires[entry.wire]
        entry.moves += 1
        while entry.wire in self._wires:  # a client may have chosen an id that looks like one of ours
            entry.moves += 1
        self.moved += 1
        self._wires[entry.wire] = entry
        entry.state, entry.rank, entry.incarnation, entry.waiting_since = RequestState.WAITING, -1, -1, now
        entry.withhold_tokens = len(entry.delivered) if entry.request.manner is ReplayManner.RESTART else 0
        entry.withhold_text = entry.text_length
        self._line.add(entry)
