"""The file of a record: two halves, of which a writer overwrites the older one in place.

A file has all its blocks from the start, so that its writer can replace the record while the disk is full. A reader takes
the newer half that is whole: each begins with a count, a length and a checksum. A reader that is overtaken by two writes
may find neither, and reads again.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib

_HEADER = struct.Struct("<QII")
_BLOCK = 4096


def half_bytes(length: int) -> int:
    """The size of half a file whose record has ``length`` bytes: whole blocks."""
    return -(-(length + _HEADER.size) // _BLOCK) * _BLOCK


def pack_half(count: int, value: bytes) -> bytes:
    """``count`` is that of the record among those of its file, from 1."""
    return _HEADER.pack(count, len(value), zlib.crc32(value, count & 0xFFFFFFFF)) + value


def unpack_newest(content: bytes) -> bytes | None:
    """The newest record in a file; None if no half is whole."""
    middle = len(content) // 2
    halves = [found for half in (content[:middle], content[middle:]) if (found := _unpack_half(half)) is not None]
    return max(halves, key=lambda found: found[0])[1] if halves else None


def _unpack_half(half: bytes) -> tuple[int, bytes] | None:
    if len(half) < _HEADER.size:
        return None
    count, length, checksum = _HEADER.unpack_from(half)
    value = half[_HEADER.size : _HEADER.size + length]
    if count == 0 or len(value) != length or zlib.crc32(value, count & 0xFFFFFFFF) != checksum:
        return None
    return count, value


class RecordFile:
    """A writer's side of its file. It owns the descriptor."""

    def __init__(self, descriptor: int, value: bytes) -> None:
        """Takes the blocks and writes the first record. OSError if there is no room; the descriptor stays open then."""
        self.descriptor, self._half, self._count = descriptor, half_bytes(len(value)), 0
        os.posix_fallocate(descriptor, 0, 2 * self._half)
        self.replace(value)

    def has_room_for(self, value: bytes) -> bool:
        return half_bytes(len(value)) <= self._half

    def replace(self, value: bytes) -> None:
        half = pack_half(self._count + 1, value)
        if os.pwrite(self.descriptor, half, (self._count % 2) * self._half) != len(half):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._count += 1
