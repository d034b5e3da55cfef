"""The seal of a record that lies where others can write: who does not have the job's key cannot make one. No I/O here.

A sealed record is::

    eep1 HMAC-SHA256 in 64 hexadecimal digits, end of line | the record

and the seal covers the whole name of its key, the instance in it, and the record. So a record that was copied from another
key or another instance does not verify. One that is put back under its own name does; the serial in it says that it is old.
"""

from __future__ import annotations

import hashlib
import hmac

from eep.control.wire.sealed_frames import KEY_BYTES

_MAGIC = b"eep1 "
_DIGITS = 2 * hashlib.sha256().digest_size
_HEAD_BYTES = len(_MAGIC) + _DIGITS + 1


class RecordSeal:
    def __init__(self, key: bytes) -> None:
        """``key`` is the job's, which also seals the frames between its processes."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"the job key must be {KEY_BYTES} bytes, got {len(key)}; make one with new_key()")
        self._key = key

    def seal(self, name: str, record: bytes) -> bytes:
        """What to store under ``name``."""
        return _MAGIC + self._digest(name, record) + b"\n" + record

    def open(self, name: str, sealed: bytes) -> bytes | None:
        """The record that is stored under ``name``; None if it was not sealed for that name with this key."""
        head, record = sealed[:_HEAD_BYTES], sealed[_HEAD_BYTES:]
        return record if hmac.compare_digest(head, _MAGIC + self._digest(name, record) + b"\n") else None

    def _digest(self, name: str, record: bytes) -> bytes:
        encoded = name.encode()
        length = len(encoded).to_bytes(4, "big")
        return hmac.digest(self._key, b"eep record" + length + encoded + record, "sha256").hex().encode()
