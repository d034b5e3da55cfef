"""Which cache entries belong to which request: what a survivor needs to take over the context of a lost rank.

A rank keeps its journal in memory that outlives it, beside its cache and the table that maps rows to cache slots. Each row of
the table has a line here: the wire id of the request that has the row, and how many of its tokens are in the cache, all of
steps that were judged good. Entries of those tokens never change while the request has the row. A line is withdrawn before
the row is given up. So a reader needs no lock: it copies what it needs, and then looks whether the line still stands.

A line is named once, when a prompt is computed. After each step only its count changes, and one store does so for all rows.

The next life of a rank takes the memory over. It numbers the journal anew first, so that no reader takes its entries for
those of the life before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAGIC = 0x4545504B56303031
_HEADER = np.dtype([("magic", "<u8"), ("rows", "<u8"), ("life", "<i8"), ("generation", "<u8")])
_LINE = np.dtype([("request", "<u8", (2,)), ("tokens", "<i8")])


@dataclass(frozen=True, slots=True)
class JournalLine:
    """The context of one request."""

    row: int
    tokens: int
    request: tuple[int, int]
    generation: int


@dataclass(frozen=True, slots=True)
class JournalState:
    """Of every row: its turn, the request that has it, and its tokens; 0 tokens if no request has it."""

    turns: npt.NDArray[np.int64]
    requests: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.int64]


def journal_bytes(rows: int) -> int:
    return _HEADER.itemsize + rows * _LINE.itemsize


def fingerprint(wire: str) -> tuple[int, int]:
    """Sixteen bytes that stand for a wire id; never all zero, which stands for none."""
    digest = hashlib.blake2b(wire.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") | 1, int.from_bytes(digest[8:], "little")


class _Journal:
    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._header = memory[: _HEADER.itemsize].view(_HEADER)
        self._lines = memory[_HEADER.itemsize :].view(_LINE)


class KvJournal(_Journal):
    """The side of the rank that has the cache."""

    def __init__(self, memory: npt.NDArray[np.uint8], rows: int, life: int) -> None:
        """Takes over memory of :func:`journal_bytes`, new or of an earlier life, whose lines are withdrawn."""
        super().__init__(memory)
        if len(self._lines) != rows:
            raise ValueError(f"a journal of {rows} rows takes {journal_bytes(rows)} bytes, and these are {memory.size}")
        self._requests, self._tokens = self._lines["request"], self._lines["tokens"]
        self.turns: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        """How often the line of each row was withdrawn: as long as that does not change, the row is the same request's. Only
        this process knows."""
        self._header["generation"] += 1
        self.withdraw_all()
        self._header["rows"], self._header["life"], self._header["magic"] = rows, life, MAGIC
        self._header["generation"] += 1

    def name(self, row: int, request: tuple[int, int]) -> None:
        """This request has this row. What the row has of it, :meth:`count` says."""
        if tuple(self._requests[row].tolist()) != request:
            self._tokens[row] = 0  # a line that names its request has no tokens of another
            self._requests[row] = request

    def count(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """A step was judged good: these rows have so many tokens in the cache. A row may have been given up since the step
        was launched. Its line has no name, and nobody reads its count."""
        self._tokens[rows] = tokens

    def withdraw(self, row: int) -> None:
        self._tokens[row] = 0
        self._requests[row] = 0
        self.turns[row] += 1

    def withdraw_all(self) -> None:
        self._tokens[:] = 0
        self._requests[:] = 0
        self.turns += 1

    def look(self) -> JournalState:
        """All lines, in a thread beside the one that writes them. What is read of a line goes together if its turn is the
        same afterwards."""
        turns = self.turns.copy()
        requests = self._requests.copy()
        return JournalState(turns, requests, np.where(requests[:, 0] != 0, self._tokens, 0))


class JournalReader(_Journal):
    """The side of a rank that takes a request over."""

    def find(self, life: int, wire: str) -> JournalLine | None:
        """The line of a request that this life served. None if there is none, or if the memory is another life's by now."""
        header = self._header[0]
        generation = int(header["generation"])
        if header["magic"] != MAGIC or header["life"] != life or generation % 2:
            return None
        request = fingerprint(wire)
        rows = np.flatnonzero((self._lines["request"] == np.asarray(request, np.uint64)).all(axis=1))
        if len(rows) != 1:
            return None
        line = JournalLine(int(rows[0]), int(self._lines["tokens"][rows[0]]), request, generation)
        return line if line.tokens > 0 and self.stands(line) else None

    def pending(self, least: int) -> int:
        """How many requests have at least so many tokens here, and were not taken yet."""
        return int(((self._lines["request"][:, 0] != 0) & (self._lines["tokens"] >= least)).sum())

    def take(self, line: JournalLine) -> None:
        """This context is not needed here any more. Only if the life that wrote the journal has ended: there is no other
        reader of the line, and the next life waits for this."""
        if self.stands(line):
            self._lines["tokens"][line.row] = 0

    def stands(self, line: JournalLine) -> bool:
        """Whether what was read since :meth:`find` is what the line says."""
        here = self._lines[line.row]
        return (
            int(self._header["generation"][0]) == line.generation
            and tuple(int(part) for part in here["request"]) == line.request
            and int(here["tokens"]) >= line.tokens
        )
