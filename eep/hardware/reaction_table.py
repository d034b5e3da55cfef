"""What a sign of failing hardware means for the ranks on it: a table that its operator may change. Pure but for the file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from eep.errors import EepError

DEFAULTS = Path(__file__).parent / "reactions.toml"
MOST_BYTES = 256 << 10
_SIGN = re.compile(r"[A-Za-z0-9._:-]{1,64}|xid\.\*")


class Reaction(Enum):
    FENCE = "fence"
    REPLACE = "replace"
    NOTE = "note"


class BadReactions(EepError, ValueError):
    """A table that cannot be used. Its text says which row, and why."""


@dataclass(frozen=True, slots=True)
class ReactionTable:
    """By the name of a sign, such as ``xid.79``. ``xid.*`` is for every Xid without a row of its own."""

    rows: Mapping[str, Reaction]

    def reaction_to(self, sign: str, severity: str = "warning") -> Reaction:
        """``severity`` decides about a sign that the table does not know: ``fatal``, ``warning`` or ``info``."""
        for row in (sign, "xid.*" if sign.startswith("xid.") else "", f"severity.{severity}"):
            if row in self.rows:
                return self.rows[row]
        return Reaction.NOTE


def parse_table(text: str, name: str = "the table") -> dict[str, Reaction]:
    """The rows of a file. :class:`BadReactions` if it is no such file."""
    try:
        rows = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadReactions(f"{name} is no TOML: {error}") from error
    found = {}
    for sign, reaction in rows.items():
        if not _SIGN.fullmatch(sign):
            raise BadReactions(f"{name}: {sign[:80]!r} is no name of a sign; write one like 'xid.79' in quotes")
        if reaction not in (each.value for each in Reaction):
            # A sign without its quotes: TOML takes the dot for a table within a table.
            hint = f'; write the whole name in quotes: "{sign}.…"' if isinstance(reaction, dict) else ""
            raise BadReactions(f"{name}: {sign!r} must be 'fence', 'replace' or 'note', not {reaction!r}{hint}")
        found[sign] = Reaction(reaction)
    return found


def read_table(path: Path | None = None) -> ReactionTable:
    """The table that EEP brings along, with the rows of ``path`` in place of its own. :class:`BadReactions` if the file
    cannot be read or used."""
    rows = parse_table(DEFAULTS.read_text(), DEFAULTS.name)
    if path is None:
        return ReactionTable(rows)
    try:
        with path.open("rb") as file:
            read = file.read(MOST_BYTES + 1)
        if len(read) > MOST_BYTES:
            raise BadReactions(f"{path} has more than {MOST_BYTES} bytes")
        return ReactionTable({**rows, **parse_table(read.decode(), str(path))})
    except (OSError, UnicodeDecodeError) as error:
        raise BadReactions(f"{path} cannot be read: {error}") from error
