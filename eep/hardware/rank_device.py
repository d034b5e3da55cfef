"""On which device each rank of a host runs: each says so itself, in a file of the private directory.

Only the process of a rank knows for sure: which device is the first depends on the variables that it was started with. The
name is one that every tool knows, such as the UUID of a GPU.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"device-(\d{1,5})")
_MOST_CHARACTERS = 128


def write_device(directory: Path, rank: int, name: str) -> None:
    """Say on which device a rank runs. OSError if there is no room."""
    path = directory / f"device-{rank}"
    try:
        if path.read_text() == name:
            return  # as in its last life, and the disk may be full
    except OSError:
        pass
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(name)
    fresh.rename(path)


def read_devices(directory: Path) -> dict[int, str]:
    """The device of every rank that has said so."""
    found = {}
    for path in directory.glob("device-*"):
        match = _NAME.fullmatch(path.name)
        try:
            name = path.read_text()[:_MOST_CHARACTERS]
        except (OSError, UnicodeDecodeError):
            continue
        if match is not None and name:
            found[int(match[1])] = name
    return found
