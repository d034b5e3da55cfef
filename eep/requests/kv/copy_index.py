"""Which page of a copy holds what, so that it can be found and believed when the process that wrote it is gone.

An entry names the request, which of its pages this is, and a checksum (XXH3) of the content, the request and that number.
The entry is cleared before its page is written, and made when the page is whole. So a page that was being written when its
process was killed has no entry, or one that its content does not fit. A reader takes a page out first, and looks at the
checksum then: whatever the owner does meanwhile, such as another life that takes the memory over, cannot harm it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from eep.requests.kv.copy_layout import PAGE
from eep.requests.kv.kv_journal import fingerprint

MAGIC = 0x4545504B56433031
_HEADER = np.dtype([("magic", "<u8"), ("kind", "<u8"), ("pages", "<u8"), ("page_bytes", "<u8"), ("life", "<i8")])
_ENTRY = np.dtype([("request", "<u8", (2,)), ("number", "<u8"), ("checksum", "<u8")])
_ALIGNED = 4096
_NOBODY = -1


def pages_in(size: int, page_bytes: int) -> int:
    """How many pages a copy of ``size`` bytes has."""
    return max(0, (size - _HEADER.itemsize - _ALIGNED) // (page_bytes + _ENTRY.itemsize))


def bytes_for(pages: int, page_bytes: int) -> int:
    """The least size of a copy with so many pages."""
    return _HEADER.itemsize + _ALIGNED + pages * (page_bytes + _ENTRY.itemsize)


def page_checksum(request: tuple[int, int], number: int, content: npt.NDArray[np.uint8]) -> int:
    return xxhash.xxh3_64_intdigest(content.data, (request[0] ^ request[1]) + number & (1 << 64) - 1)


class _Copy:
    def __init__(self, memory: npt.NDArray[np.uint8], page_bytes: int) -> None:
        count = pages_in(memory.size, page_bytes)
        start = -(-(_HEADER.itemsize + count * _ENTRY.itemsize) // _ALIGNED) * _ALIGNED
        self._header = memory[: _HEADER.itemsize].view(_HEADER)[0]
        self._entries = memory[_HEADER.itemsize :][: count * _ENTRY.itemsize].view(_ENTRY)
        self.pages: npt.NDArray[np.uint8] = memory[start : start + count * page_bytes].reshape(count, page_bytes)


class CopyWriter(_Copy):
    """The side of the rank whose contexts are copied."""

    def __init__(self, memory: npt.NDArray[np.uint8], page_bytes: int, kind: str, life: int) -> None:
        """Takes over memory that is new or of an earlier life, whose entries are cleared. ``kind`` stands for the layers of
        the cache."""
        super().__init__(memory, page_bytes)
        self._header["life"] = _NOBODY
        self._entries[:] = 0
        self._header["kind"], self._header["pages"] = fingerprint(kind)[0], len(self._entries)
        self._header["page_bytes"], self._header["magic"] = page_bytes, MAGIC
        self._header["life"] = life

    def clear(self, pages: npt.NDArray[np.int64]) -> None:
        self._entries["request"][pages] = 0

    def enter(
        self, pages: npt.NDArray[np.int64], requests: npt.NDArray[np.uint64], numbers: npt.NDArray[np.int64]
    ) -> None:
        """These pages are whole."""
        made = np.empty(len(pages), _ENTRY)
        made["request"], made["number"] = requests, numbers
        made["checksum"] = [
            page_checksum((first, second), number, self.pages[page])
            for (first, second), number, page in zip(requests.tolist(), numbers.tolist(), pages.tolist(), strict=True)
        ]
        self._entries[pages] = made


@dataclass(frozen=True, slots=True)
class CopiedPages:
    """Of a request, from its first token on without a gap: where they are, and what their content has to fit."""

    request: tuple[int, int]
    pages: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]

    @property
    def tokens(self) -> int:
        return PAGE * len(self.pages)


class CopyReader(_Copy):
    """The side of a rank that takes a request over."""

    def __init__(self, memory: npt.NDArray[np.uint8], page_bytes: int, kind: str) -> None:
        super().__init__(memory, page_bytes)
        self._kind = fingerprint(kind)[0]

    def find(self, life: int, wire: str) -> CopiedPages | None:
        """What this life has copied of a request; None if that is nothing, or if the memory is not such a copy."""
        header, request = self._header, fingerprint(wire)
        wanted = (MAGIC, self._kind, *self.pages.shape, life)
        if tuple(int(header[name]) for name in ("magic", "kind", "pages", "page_bytes", "life")) != wanted:
            return None
        its = np.flatnonzero((self._entries["request"] == np.asarray(request, np.uint64)).all(axis=1))
        numbers, first = np.unique(self._entries["number"][its], return_index=True)
        pages = its[first][: int((numbers == np.arange(len(numbers))).cumprod().sum())]
        return CopiedPages(request, pages, self._entries["checksum"][pages]) if len(pages) else None

    def take(self, found: CopiedPages, first: int, into: npt.NDArray[np.uint8]) -> None:
        """``into`` gets the pages from ``first`` on, as many as it has rows. ValueError if they are not what was copied.

        Each is looked at right after it is copied, while the processor's cache has it.
        """
        end = first + len(into)
        sources, checksums = found.pages[first:end].tolist(), found.checksums[first:end].tolist()
        for number, (page, source, checksum) in enumerate(zip(into, sources, checksums, strict=True), first):
            np.copyto(page, self.pages[source])
            if page_checksum(found.request, number, page) != checksum:
                raise ValueError(f"tokens {number * PAGE} to {(number + 1) * PAGE - 1} are not what was copied")
