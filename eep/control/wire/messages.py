"""Every message of the control plane, with a fixed schema and bounds. The epoch travels in the sealed header.

A message names ranks and numbers, never an address or a path: whatever it refers to is something the receiver
already has.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_RANKS = 65536
MAX_PAGES = 16
"""Control pages of one rank: one for each of its buffers and process group endpoints."""
MAX_DEVICE_FILES = 64

Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Number = Annotated[int, Meta(ge=-1, lt=2**62)]
Text = Annotated[str, Meta(max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]


class ControlMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """What every message is: immutable, tagged with its name, without unknown fields."""


# From a rank to its supervisor.


class Register(ControlMessage, frozen=True):
    """The first message of a rank. The descriptors that it announces come with it, in this order."""

    rank: Rank
    incarnation: Number
    pages: Annotated[int, Meta(ge=0, le=MAX_PAGES)] = 0
    pulse: bool = False
    device_files: Annotated[int, Meta(ge=0, le=MAX_DEVICE_FILES)] = 0


class SayReady(ControlMessage, frozen=True):
    """The rank has loaded what it needs and can take part."""


class SaySettled(ControlMessage, frozen=True):
    """The rank has applied the view of this message's epoch, and repaired what it had to: brought in so many experts, of so
    many bytes from each of its sources."""

    experts: Annotated[int, Meta(ge=0, lt=2**40)] = 0
    sources: Annotated[dict[Name, Number], Meta(max_length=16)] = {}


class SaySuspect(ControlMessage, frozen=True):
    """The rank waited for these past its deadline, in this message's epoch."""

    suspects: Annotated[tuple[Rank, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    evidence: Text = ""


class SayRevoked(ControlMessage, frozen=True):
    """The rank found this message's epoch revoked."""


class SayFailed(ControlMessage, frozen=True):
    """An exception ends the rank."""

    evidence: Text


class SayLeave(ControlMessage, frozen=True):
    """The rank asks to be taken out."""


# From a supervisor to its rank.


class TellView(ControlMessage, frozen=True):
    """How the instance stands; ``phase`` is "agreed" (settle, then wait) or "run"."""

    active: Annotated[tuple[Rank, ...], Meta(max_length=MAX_RANKS)]
    incarnations: Annotated[tuple[Number, ...], Meta(max_length=MAX_RANKS)]
    phase: Annotated[str, Meta(pattern="^(agreed|run)$")]


class TellRevoke(ControlMessage, frozen=True):
    """Epochs up to this message's are revoked."""

    reason: Text


class TellRefused(ControlMessage, frozen=True):
    """What the rank said was not accepted, and why. Nothing was changed."""

    reason: Text


# From a watcher, which is no rank, and back. A watcher is told views as ranks are.


class Watch(ControlMessage, frozen=True):
    """Asks for every view as it is committed, and for every rank that is gone."""


class SayMoved(ControlMessage, frozen=True):
    """Requests of that life of a rank go on elsewhere."""

    rank: Rank
    incarnation: Number
    requests: Annotated[int, Meta(ge=0, lt=2**40)]


class TellGone(ControlMessage, frozen=True):
    """This life of a rank is over or about to be ended. The view without it follows."""

    rank: Rank
    incarnation: Number
    reason: Text
    failed: bool = False
    """An exception in the rank itself ended it."""


# From an operator to a supervisor, and back.


class AskStatus(ControlMessage, frozen=True):
    pass


class AskOperation(ControlMessage, frozen=True):
    """``operation`` names the request: asking again after a lost answer does nothing twice."""

    operation: Name
    action: Annotated[str, Meta(pattern="^(remove|launch|kill)$")]
    rank: Rank


class AskEvidence(ControlMessage, frozen=True):
    """The hardware of a rank is not well. ``operation`` names the evidence. ``fatal``: the rank is to be fenced at once."""

    operation: Name
    rank: Rank
    evidence: Text
    fatal: bool


ASKED_BEFORE = "it was asked for before"
"""The answer to a request whose name is known already. Nothing was done."""


class TellAnswer(ControlMessage, frozen=True):
    """``body`` is JSON, for people to read."""

    ok: bool
    body: Annotated[str, Meta(max_length=512 * 1024)]


FromRank = Register | SayReady | SaySettled | SaySuspect | SayRevoked | SayFailed | SayLeave
FromPeer = FromRank | Watch | SayMoved | AskStatus | AskOperation | AskEvidence
FromSupervisor = TellView | TellRevoke | TellRefused | TellGone | TellAnswer
