"""What the ledger of requests speaks of: a request, what of its output is new, how it goes on, and where it stands."""

from __future__ import annotations

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
    diverged: bool = False
    """A restart produced other tokens than the client has. The request is over: nothing that follows would fit."""


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
    harmful: tuple[str, ...] = ()
    """Rank after rank was lost with them and gave no token before: it may be they that end ranks."""


@dataclass(slots=True)
class Entry:
    """One request as it stands."""

    request: Request
    accepted_at: float
    number: int
    """In the order of acceptance."""
    state: State = State.WAITING
    waiting_since: float = 0.0
    rank: int = -1
    incarnation: int = -1
    moves: int = 0
    fruitless_moves: int = 0
    """Since the last token that its client was given."""
    delivered: list[int] = field(default_factory=list)
    text_length: int = 0
    first_counts: Counts | None = None
    withhold_tokens: int = 0
    withhold_text: int = 0

    @property
    def wire(self) -> str:
        return f"{self.request.id}{MOVED}{self.moves}" if self.moves else self.request.id

    @property
    def remaining(self) -> int | None:
        limit = self.request.max_new_tokens
        return None if limit is None else max(limit - len(self.delivered), 0)
