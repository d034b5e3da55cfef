"""Finds the servers of this user on this host: by the sockets on which their supervisors listen, which the kernel lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from eep.access import check_private

_SOCKET = "control.sock"
_LISTENS = "00010000"
"""In the flags of a socket: it accepts connections."""


class NoServer(ValueError):
    """No server, or several, can be meant."""


def listening_directories(lines: Iterable[str]) -> list[Path]:
    """The directories with a supervisor's socket, from the lines of ``/proc/net/unix``."""
    found = set()
    for line in lines:
        fields = line.rstrip("\n").split(maxsplit=7)
        if len(fields) == 8 and fields[3] == _LISTENS and fields[7].endswith(f"/{_SOCKET}"):
            found.add(Path(fields[7]).parent)
    return sorted(found)


def find_servers(table: Path = Path("/proc/net/unix")) -> list[Path]:
    """The private directories of the supervisors that this user can ask."""
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [directory for directory in listening_directories(lines) if _is_ours(directory)]


def _is_ours(directory: Path) -> bool:
    try:
        check_private(directory)
        return (directory / "key").exists()
    except OSError:
        return False


def choose_server(found: Sequence[Path]) -> Path:
    """The only one. :class:`NoServer` says what to do if there is none, or if there are several."""
    if not found:
        raise NoServer("no server of yours runs on this host; give --dir or --url to ask another")
    if len(found) > 1:
        listed = "".join(f"\n  --dir {directory}" for directory in found)
        raise NoServer(f"{len(found)} servers of yours run on this host; say which:{listed}")
    return found[0]
