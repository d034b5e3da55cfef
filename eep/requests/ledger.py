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
- A request that no rank can serve waits, in order of acceptance, until the caller says that it waited too long.
- When an exception ended a rank, the requests that it had given no token yet are *doubted*: one of them may be the cause. A
  rank serves one doubted request at a time, so that none is blamed for another. The next token ends the doubt. If an
  exception ends its next rank too, the request is given up; not so if a rank that did not serve it was lost just before,
  since then that may be the cause.

In both manners the text of a life counts from its first output token. So the ledger cuts off what a client already has
by length.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

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

MOST_FRUITLESS_MOVES = 8
"""After this many moves without a new token the ledger gives a request up, if hardly any other rank was lost meanwhile: it
may be what ends one rank after the other."""
MOST_MOVES_IN_A_STORM = 32
"""The same where other ranks were lost too, so that something else may end them."""

SAME_CAUSE_WITHIN = 1.0
"""Seconds between two losses that may have one cause: ranks that share a GPU may fail together."""

LOST_OFTEN = "it was sent to a rank {count} times, and each time the rank or its output was lost"
FAILED_TWICE = "an exception ended each of the last two ranks that served it"


class Ledger:
    """All open requests of a server. See the module for its rules."""

    def __init__(self) -> None:
        self._entries: dict[str, LedgerEntry] = {}
        self._wires: dict[str, LedgerEntry] = {}
        self._line = WaitingLine()
        self._receipts = Receipts()
        # Kept up to date rather than counted: every request asks for them, and thousands may be open.
        self._loads: Counter[int] = Counter()
        self._doubted_at: Counter[int] = Counter()
        """How many of the requests that each rank serves are doubted."""
        self._losses: deque[tuple[float, tuple[int, int]]] = deque()
        """When which lives were lost, in the last :data:`SAME_CAUSE_WITHIN` seconds."""
        self._lives_lost = 0
        self._accepted = 0
        self.moved = 0
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
        entry.has_token_of_rank = False
        self._line.remove(entry)
        self._receipts.expect(entry, now)
        self._loads[rank] += 1
        self._doubted_at[rank] += entry.is_doubted

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
            if self._diverges(entry, new):
                self._forget(entry)
                return Delivery(entry.request.id, (), "", entry.first_counts, len(new), diverged=True)
            new, text, repeated = self._without_what_it_has(entry, new, text)
        if new:
            entry.fruitless_moves, entry.has_token_of_rank = 0, True
            if entry.is_doubted:
                entry.is_doubted = False
                self._doubted_at[entry.rank] -= 1
        entry.delivered += new
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
        while self._losses and now - self._losses[0][0] > SAME_CAUSE_WITHIN:
            self._losses.popleft()
        harmful = self._doubt(lost, (rank, incarnation)) if failed else []
        if (rank, incarnation) not in (life for _, life in self._losses):
            self._losses.append((now, (rank, incarnation)))
            self._lives_lost += 1
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
        return self._lose(list(self._entries.values()), now)

    def unreceived(self, now: float, limit: float) -> list[str]:
        """The wire ids of requests that did not reach their ranks ``limit`` seconds after they were sent.
        The caller tells the ranks not to begin them, and calls :meth:`never_received`."""
        return [entry.wire for entry in self._receipts.overdue(now, limit)]

    def never_received(self, wires: Iterable[str], now: float) -> LossOutcome:
        """These requests wait for a rank again, under new wire ids: if they reached their ranks after all, what comes of it
        is late."""
        return self._lose([self._wires[wire] for wire in wires], now)

    @property
    def has_unreceived(self) -> bool:
        return len(self._receipts) > 0

    def loads(self) -> dict[int, int]:
        """How many requests each rank has."""
        return {rank: count for rank, count in self._loads.items() if count}

    def rank_for(self, request_id: str, active: Collection[int]) -> int | None:
        """The rank of ``active`` that a waiting request is to be sent to; None when it has to wait on. A doubted one goes
        to no rank that has another, and other requests do so only where they must."""
        apart = [rank for rank in active if not self._doubted_at[rank]]
        return choose_rank(apart if apart or self.entry(request_id).is_doubted else active, self._loads)

    # What waits.

    @property
    def has_waiting(self) -> bool:
        return len(self._line) > 0

    def waiting(self) -> list[str]:
        """The requests that no rank has, in order of acceptance, for when other ranks are in than before."""
        return self._line.in_order()

    def held_back(self, active: Collection[int]) -> str | None:
        """The first doubted request that waits, once a rank of ``active`` serves no other such."""
        if all(self._doubted_at[rank] for rank in active):
            return None
        return self._line.first_doubted()

    def replay_of(self, request_id: str) -> Replay:
        """How the caller sends a waiting request."""
        entry = self.entry(request_id)
        if entry.state is not RequestState.WAITING:
            raise ValueError(f"request {request_id!r} is {entry.state.value}; only a waiting request can be sent")
        return self._replay(entry)

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
        self._loads[entry.rank] -= 1
        self._doubted_at[entry.rank] -= entry.is_doubted

    def _doubt(self, lost: Sequence[LedgerEntry], life: tuple[int, int]) -> list[LedgerEntry]:
        """An exception ended this life of a rank, which served these. Returns those that it speaks against for the second
        time; others are doubted from now on."""
        movable = [e for e in lost if e.state is RequestState.RUNNING and not e.request.immovable]
        doubted = [e for e in movable if not e.has_token_of_rank] or movable
        others = {other for _, other in self._losses if other != life}
        harmful = [e for e in doubted if e.is_doubted and not others - {e.doubted_since}]
        for entry in doubted:
            if not entry.is_doubted:
                entry.is_doubted, entry.doubted_since = True, life
                self._doubted_at[entry.rank] += 1
        return harmful

    def _lose(self, entries: Iterable[LedgerEntry], now: float) -> LossOutcome:
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
            elif self._seems_to_end_ranks(entry):
                self._forget(entry)
                harmful.append((entry.request.id, LOST_OFTEN.format(count=entry.fruitless_moves + 1)))
            else:
                self._move(entry, now)
                replays.append(self._replay(entry))
        return LossOutcome(tuple(replays), tuple(aborted), tuple(complete), tuple(failed), tuple(harmful))

    def _seems_to_end_ranks(self, entry: LedgerEntry) -> bool:
        """Ranks are lost wherever it goes, and few others are."""
        its_own = entry.fruitless_moves + 1
        others = self._lives_lost - entry.lost_before - its_own
        most = MOST_FRUITLESS_MOVES if others <= its_own // 4 else MOST_MOVES_IN_A_STORM
        return entry.fruitless_moves >= most

    def _move(self, entry: LedgerEntry, now: float) -> None:
        self._leave(entry)
        if not entry.fruitless_moves:
            entry.lost_before = self._lives_lost - 1
        del self._wires[entry.wire]
        entry.moves += 1
        entry.fruitless_moves += 1
        while entry.wire in self._wires:  # a client may have chosen an id that looks like one of ours
            entry.moves += 1
        self.moved += 1
        self._wires[entry.wire] = entry
        entry.state, entry.rank, entry.incarnation, entry.waiting_since = RequestState.WAITING, -1, -1, now
        entry.withhold_tokens = len(entry.delivered) if entry.request.manner is ReplayManner.RESTART else 0
        entry.withhold_text = entry.text_length
        self._line.add(entry)

    def _replay(self, entry: LedgerEntry) -> Replay:
        request = entry.request
        return Replay(
            request.id,
            entry.wire,
            request.manner,
            tuple(entry.delivered),
            entry.remaining,
            request.inexact if entry.delivered else "",
        )

    def _diverges(self, entry: LedgerEntry, tokens: tuple[int, ...]) -> bool:
        """Whether a life that began anew produced other tokens than its client has."""
        start = len(entry.delivered) - entry.withhold_tokens
        return any(mine != theirs for mine, theirs in zip(entry.delivered[start:], tokens, strict=False))

    def _without_what_it_has(
        self, entry: LedgerEntry, tokens: tuple[int, ...], text: str
    ) -> tuple[tuple[int, ...], str, int]:
        """The tokens and text that the client does not have yet, and how many tokens it has already."""
        repeated = min(entry.withhold_tokens, len(tokens))
        entry.withhold_tokens -= repeated
        cut = min(entry.withhold_text, len(text))
        entry.withhold_text -= cut
        return tokens[repeated:], text[cut:], repeated


def choose_rank(active: Collection[int], loads: Mapping[int, int]) -> int | None:
    """The least loaded rank, the lowest of equals; None when there is none."""
    return min(active, key=lambda rank: (loads.get(rank, 0), rank), default=None)
