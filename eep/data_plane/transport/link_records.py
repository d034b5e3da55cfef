"""What one end of a link tells the other through the store, sealed with the key of the job; and the secret that both make
from that key. No I/O here.

A record is::

    magic | nonce (16 bytes) | shape of the region | offer of the link | HMAC-SHA256 of its name and all before (32 bytes)

The name says whose record it is and for whom, each with its incarnation. So a record that was copied from another pair, or
from another life, does not verify. All parts have fixed sizes, and the seal is checked before anything is read.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
from dataclasses import dataclass

from eep.abi.hosts import LinkOffer, LinkSecret
from eep.abi.structures import Shape
from eep.errors import EepError

KEY_BYTES = 32
NONCE_BYTES = 16
_MAGIC = b"EEP-LINK-1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_HEAD_BYTES = len(_MAGIC) + NONCE_BYTES
_SIZE = _HEAD_BYTES + ctypes.sizeof(Shape) + ctypes.sizeof(LinkOffer) + _DIGEST_BYTES


class BadLinkRecord(EepError):
    """A record that was not sealed with the key of this job, or does not fit."""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """One incarnation of a rank."""

    rank: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.rank}.{self.incarnation}"


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """One end of a link, as its owner announces it."""

    nonce: bytes
    shape: bytes
    offer: bytes


def link_name(owner: LinkEnd, peer: LinkEnd, service: str = "links") -> str:
    """Under what the record of ``owner`` for ``peer`` is published. Two ranks may have links for several services."""
    return f"{service}/{owner}/{peer}"


def seal_link(key: bytes, name: str, record: LinkRecord) -> bytes:
    content = _MAGIC + record.nonce + record.shape + record.offer
    return content + _seal(key, name, content)


def open_link(key: bytes, name: str, value: bytes) -> LinkRecord:
    """The record that is published under ``name``. Raises :class:`BadLinkRecord`."""
    content, seal = value[:-_DIGEST_BYTES], value[-_DIGEST_BYTES:]
    if len(value) != _SIZE or not hmac.compare_digest(seal, _seal(key, name, content)):
        raise BadLinkRecord(
            f"what is published as {name} was not made with the key of this job; give all hosts the same"
        )
    if not content.startswith(_MAGIC):
        raise BadLinkRecord(f"the record {name} is of another version")
    body = content[_HEAD_BYTES:]
    shape_bytes = ctypes.sizeof(Shape)
    return LinkRecord(content[len(_MAGIC) : _HEAD_BYTES], body[:shape_bytes], body[shape_bytes:])


def secret_of(key: bytes, name: str, nonce: bytes) -> LinkSecret:
    """What a peer needs to write to the end that ``name`` announces. It depends on the key of the job, and is never sent."""
    made, wanted = b"", ctypes.sizeof(LinkSecret)
    for counter in range(-(-wanted // _DIGEST_BYTES)):
        made += hmac.digest(key, b"eep link secret" + bytes([counter]) + nonce + name.encode(), "sha256")
    return LinkSecret.from_buffer_copy(made[:wanted])


def _seal(key: bytes, name: str, content: bytes) -> bytes:
    encoded = name.encode()
    return hmac.digest(key, b"eep link record" + len(encoded).to_bytes(4, "big") + encoded + content, "sha256")
