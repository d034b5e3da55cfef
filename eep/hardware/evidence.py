"""A sign that hardware fails, as its sender tells it, and the ranks that it is about. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from eep.errors import EepError

MOST_BYTES = 16 << 10
Printable = Annotated[str, Meta(max_length=512, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$(?!\n)")]
"""No control characters: an operator's terminal shows it."""
Sign = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}$(?!\n)")]
EvidenceId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,48}$(?!\n)")]


class BadEvidence(EepError, ValueError):
    """What was sent is no evidence. Nothing was changed."""


class UnknownHardware(BadEvidence):
    """No rank of this server runs there."""


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``id`` names the evidence: telling it again does nothing twice. ``reason`` is a row of the table of reactions, or any
    other word; then ``severity`` decides. One of ``rank``, ``device`` and ``host`` says where it was seen."""

    id: EvidenceId
    reason: Sign
    rank: Annotated[int, Meta(ge=0, lt=65536)] | None = None
    device: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    host: Annotated[str, Meta(min_length=1, max_length=253)] | None = None
    severity: Literal["fatal", "warning", "info"] = "warning"
    detail: Printable = ""

    @property
    def text(self) -> str:
        """For people."""
        where = "" if self.device is None else f" of {self.device}"
        return f"{self.reason}{where}{f': {self.detail}' if self.detail else ''}"


def parse_evidence(body: bytes) -> Evidence:
    """The evidence in ``body``, which is JSON. :class:`BadEvidence` says what is wrong with it."""
    if len(body) > MOST_BYTES:
        raise BadEvidence(f"the evidence has {len(body)} bytes; at most {MOST_BYTES} are read")
    try:
        given = msgspec.json.decode(body, type=Evidence)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadEvidence(f"this is no evidence: {error}") from error
    if sum(each is not None for each in (given.rank, given.device, given.host)) != 1:
        raise BadEvidence("evidence is about one 'rank', one 'device' or one 'host': give one of them")
    return given


def ranks_of(given: Evidence, devices: Mapping[int, Collection[str]], hosts: Collection[str]) -> list[int]:
    """The ranks that evidence is about. ``devices``: the names of each rank's device. ``hosts``: the names of this host."""
    if given.host is not None:
        if given.host not in hosts:
            raise UnknownHardware(f"no rank of this server runs on host {given.host!r}; they run on {sorted(hosts)[0]}")
        return sorted(devices)
    if given.device is not None:
        found = sorted(rank for rank, names in devices.items() if given.device in names)
        if not found:
            known = ", ".join(sorted({name for names in devices.values() for name in names})) or "none is known yet"
            raise UnknownHardware(f"no rank of this server runs on device {given.device!r}; their devices: {known}")
        return found
    assert given.rank is not None  # parse_evidence has seen to it
    if given.rank not in devices:
        raise UnknownHardware(f"there is no rank {given.rank}; there are ranks 0 to {len(devices) - 1}")
    return [given.rank]
