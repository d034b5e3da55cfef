"""The messages between an embedded store and the hosts that share it. ``call`` ties an answer to its question."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from eep.control.wire.messages import Message, Text

Call = Annotated[int, Meta(ge=0, lt=2**62)]
Key = Annotated[str, Meta(max_length=512)]
Value = Annotated[bytes, Meta(max_length=512 * 1024)]
Version = Annotated[int, Meta(ge=0, lt=2**62)]


class StoredEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: Value
    version: Version


class Get(Message, frozen=True):
    call: Call
    key: Key


class CompareAndSwap(Message, frozen=True):
    call: Call
    key: Key
    expected: Version
    value: Value
    lease: Version | None


class Grant(Message, frozen=True):
    call: Call
    ttl: Annotated[float, Meta(gt=0, le=86400)]


class KeepAlive(Message, frozen=True):
    call: Call
    lease: Version


class EndLease(Message, frozen=True):
    call: Call
    lease: Version


class Watch(Message, frozen=True):
    """Answered with a listing, then with a change each, until :class:`Unwatch` for the same call."""

    call: Call
    prefix: Key


class Unwatch(Message, frozen=True):
    call: Call


class IsEntry(Message, frozen=True):
    call: Call
    entry: StoredEntry | None


class IsSwap(Message, frozen=True):
    call: Call
    done: bool
    entry: StoredEntry | None


class IsNumber(Message, frozen=True):
    """A lease; or 1 and 0 for whether one stands."""

    call: Call
    number: Version


class IsListing(Message, frozen=True):
    call: Call
    entries: dict[Key, StoredEntry]
    version: Version


class IsChange(Message, frozen=True):
    call: Call
    key: Key
    value: Value | None
    version: Version


class IsLeaseEnded(Message, frozen=True):
    call: Call
    reason: Text


ToStore = Get | CompareAndSwap | Grant | KeepAlive | EndLease | Watch | Unwatch
FromStore = IsEntry | IsSwap | IsNumber | IsListing | IsChange | IsLeaseEnded
