"""Sealed frames: what two ends of the control plane exchange, whatever carries the bytes. No I/O here.

Each side greets with a random nonce; both nonces and the job's key make the key of the session. A frame is::

    length u32 | sequence u64 | epoch u64 | HMAC-SHA256 (32 bytes) | payload (msgpack of one message)

and the seal covers direction, header and payload. So a frame of another job, session, direction or position
does not verify, which is what replaying one amounts to. Epochs never fall within a session. The payload is
decoded only after the seal has been checked, against a fixed schema.

Frames are authentic, not secret: between hosts, use a network that others cannot listen to.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

MAGIC = b"EEP1"
NONCE_BYTES = 16
KEY_BYTES = 32
MAX_PAYLOAD = 1 << 20

_GREETING_BYTES = len(MAGIC) + NONCE_BYTES
_HEADER = struct.Struct(">IQQ")
_SEAL_BYTES = hashlib.sha256().digest_size

M = TypeVar("M", bound=msgspec.Struct)


class WireError(ConnectionError):
    """What came in does not verify. The session is over; ``kind`` is what to count it under."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class SessionEnd(Enum):
    """Which end of a session this is; each seals with its own label."""

    CLIENT = b"C"
    SERVER = b"S"


@dataclass(frozen=True, slots=True)
class ReceivedMessage(Generic[M]):
    message: M
    epoch: int


class SealedChannel(Generic[M]):
    """One end of a session: seals what goes out, verifies what comes in."""

    def __init__(self, key: bytes, end: SessionEnd, accepts: Any, *, nonce: bytes | None = None) -> None:
        """``accepts`` is the union of message types that may come in."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"the job key must be {KEY_BYTES} bytes, got {len(key)}; make one with new_key()")
        self._key = key
        self._end = end
        self._nonce = nonce if nonce is not None else os.urandom(NONCE_BYTES)
        self._session: bytes | None = None
        self._buffer = bytearray()
        self._sent = 0
        self._got = 0
        self._epoch = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(accepts)

    @property
    def established(self) -> bool:
        """Whether the other side has greeted, so that frames can be sealed."""
        return self._session is not None

    def greeting(self) -> bytes:
        """The first bytes to send."""
        return MAGIC + self._nonce

    def seal(self, message: msgspec.Struct, epoch: int = 0) -> bytes:
        """The frame that carries ``message``."""
        if self._session is None:
            raise WireError("no-session", "the peer has not greeted yet; wait for that before sending")
        payload = self._encoder.encode(message)
        if len(payload) > MAX_PAYLOAD:
            raise WireError("too-large", f"a message of {len(payload)} bytes, over the limit of {MAX_PAYLOAD}")
        header = _HEADER.pack(len(payload), self._sent, epoch)
        self._sent += 1
        return header + _seal(self._session, self._end, header, payload) + payload

    def feed(self, data: bytes) -> list[ReceivedMessage[M]]:
        """The messages that are complete now. Raises :class:`WireError` at the first that does not verify."""
        self._buffer += data
        received: list[ReceivedMessage[M]] = []
        if self._session is None and not self._read_greeting():
            return received
        while (one := self._read_frame()) is not None:
            received.append(one)
        return received

    def _read_greeting(self) -> bool:
        start = bytes(self._buffer[: len(MAGIC)])
        if not MAGIC.startswith(start):
            raise WireError("bad-greeting", "the peer does not speak this version of the protocol")
        if len(self._buffer) < _GREETING_BYTES:
            return False
        theirs = bytes(self._buffer[len(MAGIC) : _GREETING_BYTES])
        del self._buffer[:_GREETING_BYTES]
        if theirs == self._nonce:
            raise WireError("reflected", "the peer sent our own nonce back")
        client, server = (self._nonce, theirs) if self._end is SessionEnd.CLIENT else (theirs, self._nonce)
        self._session = hmac.digest(self._key, b"eep session" + client + server, "sha256")
        return True

    def _read_frame(self) -> ReceivedMessage[M] | None:
        assert self._session is not None
        if len(self._buffer) < _HEADER.size:
            return None
        header = bytes(self._buffer[: _HEADER.size])
        length, sequence, epoch = _HEADER.unpack(header)
        if length > MAX_PAYLOAD:
            raise WireError("too-large", f"a frame announces {length} bytes, over the limit of {MAX_PAYLOAD}")
        start, end = _HEADER.size + _SEAL_BYTES, _HEADER.size + _SEAL_BYTES + length
        if len(self._buffer) < end:
            return None
        seal, payload = bytes(self._buffer[_HEADER.size : start]), bytes(self._buffer[start:end])
        del self._buffer[:end]
        theirs = SessionEnd.SERVER if self._end is SessionEnd.CLIENT else SessionEnd.CLIENT
        if not hmac.compare_digest(seal, _seal(self._session, theirs, header, payload)):
            raise WireError("bad-seal", "a frame is not sealed with this job's key for this session")
        if sequence != self._got:
            raise WireError("replayed", f"frame {sequence} came where frame {self._got} was due")
        if epoch < self._epoch:
            raise WireError("stale-epoch", f"a frame of epoch {epoch} came after one of epoch {self._epoch}")
        self._got, self._epoch = sequence + 1, epoch
        try:
            return ReceivedMessage(self._decoder.decode(payload), epoch)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireError("bad-message", f"a sealed frame holds no known message: {error}") from error


def new_key() -> bytes:
    """A fresh key for a job."""
    return os.urandom(KEY_BYTES)


def _seal(session: bytes, end: SessionEnd, header: bytes, payload: bytes) -> bytes:
    return hmac.digest(session, end.value + header + payload, "sha256")
