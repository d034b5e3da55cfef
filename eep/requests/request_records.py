"""The records of the ledger: a request, its delivered output, its replay, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

MOVED = "~"
"""Stands between the id and the number of moves in a wire id. Engines abort by prefix, which finds every life."""


class ReplayManner(Enum):
    """How the next rank takes up a request."""

    RESUME = "resume"
    """From the tokens that the client has."""
    RESTART = "restart"
    """From the prompt; the ledger withholds what the client has."""


class RequestState(Enum):
    """Where an open request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ABORTING = "aborting"
    """The client wants no more; the rank has been told so and will answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is known when a request is accepted. Each sample of ``n > 1`` is a request of its own."""

    id: str
    max_new_tokens: int | None = None
    manner: ReplayManner = ReplayManner.RESUME
    inexact: str = ""
    """Why a replay may differ from what the lost rank would have produced; empty when it cannot."""
    immovable: str = ""
    """Why the request cannot be replayed at all; empty when it can."""
    prompt_tokens: int = 0


class Counts(NamedTuple):
    """What a reply says about its size. A tuple, like :class:`Delivery`: the server makes one for every token."""

    prompt: int
    completion: int
    cached: int = 0


class Delivery(NamedTuple):
    """The part of an output that is new to the client, with counts as if no rank had been lost.

    A request that moved shows the prompt and the cache hits of its first life, and all tokens that the client has."""

    id: str
    tokens: tuple[int, ...]
    text: str
    counts: Counts
    withheld: int
    """How many tokens at the front the ledger left out because the client has them."""
    diverged: bool = False
    """A restart produced other tokens than the client has. The request is over: no further output would fit."""


@dataclass(frozen=True, slots=True)
class Replay:
    """How a request goes on: the caller sends it again under ``wire``."""

    id: str
    wire: str
    manner: ReplayManner
    delivered: tuple[int, ...]
    max_new_tokens: int | None
    """How many of the allowed tokens are left after ``delivered``."""
    inexact: str
    last_life: tuple[int, int, str] | None = None
    """The rank and incarnation that served it last, and the wire id that it had there."""


@dataclass(frozen=True, slots=True)
class LossOutcome:
    """What the loss of a rank means for its requests."""

    replays: tuple[Replay, ...] = ()
    aborted: tuple[str, ...] = ()
    """Their clients had asked to abort, and the rank that was to answer is gone: the caller answers."""
    complete: tuple[str, ...] = ()
    """They had all the tokens they may have; only the notice that they are finished was lost."""
    failed: tuple[tuple[str, str], ...] = ()
    """Those that cannot be replayed, each with the reason."""
    harmful: tuple[tuple[str, str], ...] = ()
    """Those that may be what ends ranks, each with the reason: rank after rank was lost with them and gave no token."""


@dataclass(slots=True)
class LedgerEntry:
    """One open request as it stands."""

    request: Request
    accepted_at: float
    number: int
    """Its place in the order of acceptance."""
    state: RequestState = RequestState.WAITING
    waiting_since: float = 0.0
    rank: int = -1
    incarnation: int = -1
    moves: int = 0
    fruitless_moves: int = 0
    """Moves since the client last got a token."""
    lost_before: int = 0
    """How many ranks were lost before the first of these moves."""
    last_life: tuple[int, int, str] | None = None
    """See :class:`Replay`."""
    has_token_of_rank: bool = False
    """Whether the rank that serves it has given a new token."""
    is_doubted: bool = False
    """An exception ended the last rank that served it, and no rank has given a token since."""
    doubted_since: tuple[int, int] = (-1, -1)
    """The rank and incarnation that ended so."""
    delivered: list[int] = field(default_factory=list)
    text_length: int = 0
    first_counts: Counts | None = None
    withhold_tokens: int = 0
    withhold_text: int = 0

    @property
    def tokens(self) -> int:
        """How long its context is."""
        return self.request.prompt_tokens + len(self.delivered)

    @property
    def wire(self) -> str:
        return f"{self.request.id}{MOVED}{self.moves}" if self.moves else self.request.id

    @property
    def remaining(self) -> int | None:
        limit = self.request.max_new_tokens
        return None if limit is None else max(limit - len(self.delivered), 0)

    @property
    def replay(self) -> Replay:
        """How it goes on from here."""
        return Replay(
            self.request.id,
            self.wire,
            self.request.manner,
            tuple(self.delivered),
            self.remaining,
            self.request.inexact if self.delivered else "",
            self.last_life,
        )
