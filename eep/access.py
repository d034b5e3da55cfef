"""Who may reach what on a host: directories that only this user can enter, and the user behind a Unix socket.

Everything that ranks, supervisors and operators share lies in such directories. A process that connects to a socket there
is asked for nothing else than to be of the same user; the kernel says so.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eep.errors import EepError

TEMPORARY_PREFIX = "eep-"
_MOST_SOCKET_PATH_BYTES = 107
_CREDENTIALS = struct.Struct("3i")


class NotPrivate(EepError, PermissionError):
    """Other users can enter a directory, or read a file, that must be private."""


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """The process at the other end of a Unix socket, as the kernel knows it."""

    pid: int
    uid: int
    gid: int

    @property
    def is_same_user(self) -> bool:
        return self.uid == os.geteuid()


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """The process that connected, or that listens where we connected."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerCredentials(*_CREDENTIALS.unpack(found))


def make_private(path: Path) -> Path:
    """Makes the directory ``path`` if it is not there yet, and those above it, all private. :class:`NotPrivate` if other
    users could enter it."""
    for missing in reversed([each for each in (path, *path.parents) if not each.exists()]):
        with contextlib.suppress(FileExistsError):  # another process made it first
            missing.mkdir(mode=0o700)
    return check_private(path)


def make_temporary() -> Path:
    """Makes a fresh private directory in :func:`temporary_base`."""
    return Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=temporary_base()))


def temporary_base() -> Path:
    """Where temporary private directories lie."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def check_private(path: Path) -> Path:
    """``path``, if it is a directory of this user that no other user can enter; :class:`NotPrivate` if not."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise NotPrivate(
            f"{path} must be a directory of yours that no other user can enter; run 'chmod 700 {path}' or name another"
        )
    return path


def check_socket_path(path: str | os.PathLike[str]) -> str:
    """``path``, if a Unix socket can have it; ValueError if it is too long."""
    if len(os.fsencode(path)) > _MOST_SOCKET_PATH_BYTES:
        raise ValueError(f"{os.fspath(path)} is too long for a Unix socket; choose a shorter directory")
    return os.fspath(path)
