"""What supervisors send each other over a host link. As with all messages, no address and no path is among it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from eep.control.wire.messages import MAX_RANKS, ControlMessage, Name, Number, Rank


class HostGreeting(ControlMessage, frozen=True):
    """The first message of each end: which supervisor it is, and which one it means to speak to."""

    ident: Name
    to: Name


class HostBeat(ControlMessage, frozen=True):
    """This end is there. ``echo`` is the number of the last one that it heard from the other end; -1: none."""

    number: Number
    echo: Number = -1


class HostNews(ControlMessage, frozen=True):
    """Lives of ranks of this end that have ended, and the last epoch that its ranks can no longer finish."""

    dead: Annotated[dict[Rank, Number], Meta(max_length=MAX_RANKS)]
    revoked: Number


FromHost = HostGreeting | HostBeat | HostNews
