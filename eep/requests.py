"""The ledger of accepted requests: who serves each, what its client has received, and how it goes on elsewhere.

Pure bookkeeping: no I/O, no clock (times are given), nothing of any serving engine. Whoever owns the sockets tells it
what happened and does what it answers.

- A request is on one rank at a time, under a *wire id* of its own for each life there. What comes in under an
  older wire id is late output of a rank that was given up, and is dropped.
- When a rank is lost its requests are replayed: prompt plus all that was delivered, once, however often they
  move. With :attr:`Manner.RESUME` the next rank is told what was delivered and goes on from there. With
  :attr:`Manner.RESTART` it begins anew and what it repeats is withheld; that is for requests whose output is more
  than tokens and their log-probabilities.
- A finished request never moves. An aborted one is never replayed; its client is answered instead.
- A request that nobody can serve waits, in order of acceptance, until the caller says that it waited too long.

The text of a life counts from its first output token in both manners, so what a client already has is cut off
by length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

MOVED = "~"
"""Between an id and the number of moves in a wire id. Aborting by prefix, as engines do, finds every life."""


class Manner(Enum):
    RESUME = "resume"
    RESTART = "restart"


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ABORTING = "aborting"
    """Its client wants no more; the rank has been told and will answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is known when a request is accepted. Each sample of ``n > 1`` is a request of its own."""

    id: str
    prompt: tuple[int, ...] | None = None
    """None when the engine alone knows it; it is then part of what the caller keeps to send again."""
    max_new_tokens: int | None = None
    manner: Manner = Manner.RESUME
    inexact: str = ""
    """Why the rest may differ from what the lost rank would have produced; empty when it cannot."""
    immovable: str = ""
    """Why it cannot be replayed at all; empty when it can."""


class Counts(NamedTuple):
    """What a reply says about its size. (A tuple, as :class:`Delivery`, because one is made for every token that passes.)"""

    prompt: int
    completion: int
    cached: int = 0


class Delivery(NamedTuple):
    """What of an output is new to the client, and the counts as if nothing had happened: of a request that moved, the prompt
    and the cache hit of its first life, and every token that it was given."""

    id: str
    tokens: tuple[int, ...]
    text: str
    counts: Counts
    withheld: int
    """How many tokens at the front were left out because the client has them."""


@dataclass(frozen=True, slots=True)
class Replay:
    """How a request goes on: send it again under ``wire``."""

    id: str
    wire: str
    manner: Manner
    prompt: tuple[int, ...] | None
    delivered: tuple[int, ...]
    max_new_tokens: int | None
    """What is left of the limit after ``delivered``."""
    inexact: str

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Prompt and delivered tokens in one. Seeded sampling by position goes on at its length."""
        if self.prompt is None:
            raise ValueError(f"the prompt of request {self.id} is not known here")
        return self.prompt + self.delivered


@dataclass(frozen=True, slots=True)
class Lost:
    """What the loss of a rank means for its requests."""

    replays: tuple[Replay, ...] = ()
    aborted: tuple[str, ...] = ()
    """Their clients had asked to abort; nobody else will answer them now."""
    complete: tuple[str, ...] = ()
    """They had all tokens they may have; only the word that they are finished was lost."""
    failed: tuple[tuple[str, str], ...] = ()
    """Cannot be replayed, and why."""


@dataclass(slots=True)
class Entry:
    """One request as it stands."""

    request: Request
    accepted_at: float
    state: State = State.WAITING
    waiting_since: float = 0.0
    rank: int = -1
    incarnation: int = -1
    moves: int = 0
    delivered: list[int] = field(default_factory=list)
    text_length: int = 0
    first_counts: Counts | None = None
    diverged: bool = False
    """A restart produced other tokens than the client already has."""
    withhold_tokens: int = 0
    withhold_text: int = 0

    @property
    def wire(self) -> str:
        return f"{self.request.id}{MOVED}{self.moves}" if self.moves else self.request.id

    @property
    def remaining(self) -> int | None:
        limit = self.request.max_new_tokens
        return None if limit is None else max(limit - len(self.delivered), 0)


class Ledger:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._wires: dict[str, Entry] = {}
        self.moved = 0
        self.dropped = 0
        """Outputs of no life that is open: late, or of something that was never accepted."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def entry(self, request_id: str) -> Entry:
        try:
            return self._entries[request_id]
        except KeyError:
            raise KeyError(f"no request {request_id!r} is open; it has ended, or was never accepted") from None

    # What happens to a request.

    def accept(self, request: Request, now: float) -> Entry:
        if request.id in self._entries:
            raise ValueError(f"request {request.id!r} is open already; ids must be distinct")
        if request.id in self._wires:
            raise ValueError(f"request {request.id!r} has the wire id of another; choose another id")
        entry = Entry(request, now, waiting_since=now)
        self._entries[request.id] = entry
        self._wires[entry.wire] = entry
        return entry

    def assigned(self, request_id: str, rank: int, incarnation: int) -> None:
        """It has been sent to a rank."""
        entry = self.entry(request_id)
        if entry.state is not State.WAITING:
            raise ValueError(f"request {request_id!r} is {entry.state.value}; only a waiting one is assigned")
        entry.state, entry.rank, entry.incarnation = State.RUNNING, rank, incarnation

    def delivered(
        self, wire: str, tokens: Sequence[int], counts: Counts, *, text: str = "", finished: bool = False
    ) -> Delivery | None:
        """A rank sent output. None when it is late: nobody may see it."""
        entry = self._wires.get(wire)
        if entry is None or entry.state is State.WAITING:
            self.dropped += 1
            return None
        if entry.first_counts is None:
            entry.first_counts = counts
        new, repeated = tuple(tokens), 0
        if entry.moves:
            new, text, repeated = self._without_what_it_has(entry, new, text)
        entry.delivered += new
        entry.text_length += len(text)
        if entry.moves:
            counts = entry.first_counts._replace(completion=len(entry.delivered))
        if finished:
            self._forget(entry)
        return Delivery(entry.request.id, new, text, counts, repeated)

    def abort(self, request_id: str) -> bool:
        """Its client wants no more. True when a rank will answer; False when the caller must, now."""
        entry = self._entries.get(request_id)
        if entry is None:
            return True  # it has ended; whoever ended it answered
        if entry.state is State.WAITING:
            self._forget(entry)
            return False
        entry.state = State.ABORTING
        return True

    def ended(self, request_id: str) -> None:
        """It is over, for whatever reason. Telling it again does nothing."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._forget(entry)

    def id_of(self, wire: str) -> str | None:
        """Whose current life this is; None for a life that is over."""
        entry = self._wires.get(wire)
        return None if entry is None or entry.state is State.WAITING else entry.request.id

    # What happens to ranks.

    def rank_lost(self, rank: int, incarnation: int, now: float) -> Lost:
        """Its requests wait for another rank now, under new wire ids. Telling it again does nothing."""
        return self._lose([e for e in self._entries.values() if (e.rank, e.incarnation) == (rank, incarnation)], now)

    def keep_only(self, live: Mapping[int, int], now: float) -> Lost:
        """Every request on a rank that is not in ``live`` (rank to incarnation) is lost to it."""
        return self._lose([e for e in self._entries.values() if live.get(e.rank) != e.incarnation], now)

    def loads(self) -> dict[int, int]:
        """How many requests each rank has."""
        counted: dict[int, int] = {}
        for entry in self._entries.values():
            if entry.state is not State.WAITING:
                counted[entry.rank] = counted.get(entry.rank, 0) + 1
        return counted

    # What waits.

    def waiting(self) -> list[str]:
        """Those that no rank has, in order of acceptance."""
        return [request_id for request_id, entry in self._entries.items() if entry.state is State.WAITING]

    def replay_of(self, request_id: str) -> Replay:
        """How a waiting request is to be sent."""
        entry = self.entry(request_id)
        if entry.state is not State.WAITING:
            raise ValueError(f"request {request_id!r} is {entry.state.value}; only a waiting one is sent")
        return self._replay(entry)

    def give_up(self, now: float, limit: float) -> list[str]:
        """Forget those that have waited for ``limit`` seconds; the caller tells their clients to try again."""
        overdue = [
            entry
            for entry in self._entries.values()
            if entry.state is State.WAITING and now - entry.waiting_since >= limit
        ]
        for entry in overdue:
            self._forget(entry)
        return [entry.request.id for entry in overdue]

    # Details.

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.request.id]
        del self._wires[entry.wire]

    def _lose(self, entries: Iterable[Entry], now: float) -> Lost:
        replays: list[Replay] = []
        aborted: list[str] = []
        complete: list[str] = []
        failed: list[tuple[str, str]] = []
        for entry in entries:
            if entry.state is State.WAITING:
                continue
            if entry.state is State.ABORTING:
                self._forget(entry)
                aborted.append(entry.request.id)
            elif entry.request.immovable:
                self._forget(entry)
                failed.append((entry.request.id, entry.request.immovable))
            elif entry.remaining == 0 and entry.delivered:
                self._forget(entry)
                complete.append(entry.request.id)
            else:
                self._move(entry, now)
                replays.append(self._replay(entry))
        return Lost(tuple(replays), tuple(aborted), tuple(complete), tuple(failed))

    def _move(self, entry: Entry, now: float) -> None:
        del self._wires[entry.wire]
        entry.moves += 1
        while entry.wire in self._wires:  # a client may have chosen an id that looks like one of ours
            entry.moves += 1
        self.moved += 1
        self._wires[entry.wire] = entry
        entry.state, entry.rank, entry.incarnation, entry.waiting_since = State.WAITING, -1, -1, now
        entry.withhold_tokens = len(entry.delivered) if entry.request.manner is Manner.RESTART else 0
        entry.withhold_text = entry.text_length

    def _replay(self, entry: Entry) -> Replay:
        request = entry.request
        return Replay(
            request.id,
            entry.wire,
            request.manner,
            request.prompt,
            tuple(entry.delivered),
            entry.remaining,
            request.inexact if entry.delivered else "",
        )

    def _without_what_it_has(
        self, entry: Entry, tokens: tuple[int, ...], text: str
    ) -> tuple[tuple[int, ...], str, int]:
        """What of this output its client does not have from an earlier life; and how many tokens it has."""
        repeated = min(entry.withhold_tokens, len(tokens))
        if repeated:
            start = len(entry.delivered) - entry.withhold_tokens
            entry.diverged |= list(tokens[:repeated]) != entry.delivered[start : start + repeated]
            entry.withhold_tokens -= repeated
        cut = min(entry.withhold_text, len(text))
        entry.withhold_text -= cut
        return tokens[repeated:], text[cut:], repeated


def choose_rank(active: Collection[int], loads: Mapping[int, int]) -> int | None:
    """The least loaded rank, the lowest of equals; None when there is none."""
    return min(active, key=lambda rank: (loads.get(rank, 0), rank), default=None)
