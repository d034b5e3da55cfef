"""Which ranks serve experts only, for processes beside the front end: a small file in the server's directory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

_FILE = "experts-only"
_MOST_BYTES = 1 << 20


def write_roles(directory: Path, experts_only: Iterable[int]) -> None:
    """Where there is no room the file stays as it was: it decides nothing that the front end does."""
    place = directory / f".{_FILE}"
    with suppress(OSError):
        place.write_bytes(msgspec.json.encode(sorted(experts_only)))
        place.rename(directory / _FILE)


def read_roles(directory: Path) -> frozenset[int]:
    """The ranks that serve experts only."""
    try:
        with (directory / _FILE).open("rb") as file:
            return frozenset(msgspec.json.decode(file.read(_MOST_BYTES), type=list[int]))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return frozenset()
