"""The private directory of a supervisor: its socket, the job's key, and the directories of its ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from eep.access import NotPrivate, check_private, check_socket_path, make_private, make_temporary
from eep.control.wire.sealed_frames import KEY_BYTES, new_key

CONTROL_DIRECTORY = "EEP_CONTROL_DIR"
"""The environment variable by which a rank finds its supervisor."""


class PrivateDirectory:
    """Mode 0700, owned by this user. ``control.sock`` is where the supervisor listens, ``key`` holds the job's key."""

    def __init__(self, path: Path) -> None:
        self.path = check_private(path)
        check_socket_path(self.socket)

    @classmethod
    def create(cls, path: Path | None = None, key: bytes | None = None) -> PrivateDirectory:
        """Makes one with a key in it, at ``path`` or in a temporary place. Hosts of one job share a key."""
        directory = cls(make_temporary() if path is None else make_private(path))
        if key is not None or not directory._key_path.exists():
            descriptor = os.open(directory._key_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key if key is not None else new_key())
        directory.key()
        return directory

    @property
    def socket(self) -> Path:
        return self.path / "control.sock"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def ranks(self) -> Path:
        """Where the ranks of this host meet each other."""
        return self.path / "r"

    @property
    def experts(self) -> Path:
        """Where the ranks of this host say which experts they hold, and serve them to each other."""
        return self.ranks / "experts"

    @property
    def _key_path(self) -> Path:
        return self.path / "key"

    def key(self) -> bytes:
        found = self._key_path.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or found.st_size != KEY_BYTES:
            raise NotPrivate(
                f"{self._key_path} must be {KEY_BYTES} bytes that no other user can read; remove it to have another made"
            )
        return self._key_path.read_bytes()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def member_rendezvous() -> Path:
    """Where the ranks of this host's supervisor meet."""
    return PrivateDirectory(Path(os.environ[CONTROL_DIRECTORY])).ranks
