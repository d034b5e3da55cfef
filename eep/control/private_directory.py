"""The private directory of a supervisor: its socket and the job's key, closed to other users."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from eep.control.wire.sealed_frames import KEY_BYTES, new_key

CONTROL_DIRECTORY = "EEP_CONTROL_DIR"
"""The environment variable by which a rank finds its supervisor."""
_MAX_SOCKET_PATH = 107


class PrivateDirectory:
    """Mode 0700, owned by us. ``control.sock`` is where the supervisor listens, ``key`` holds the job's key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(
                f"{path} must be a directory that only you can enter; run 'chmod 700 {path}' or name another"
            )
        if len(os.fsencode(self.socket)) > _MAX_SOCKET_PATH:
            raise ValueError(f"{self.socket} is too long for a Unix socket; choose a shorter directory")

    @classmethod
    def create(cls, path: Path | None = None, key: bytes | None = None) -> PrivateDirectory:
        """A directory with a key in it, at ``path`` or among the temporary files. Hosts of one job share a key."""
        if path is None:
            path = Path(tempfile.mkdtemp(prefix="eep-", dir=os.environ.get("XDG_RUNTIME_DIR")))
        else:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = cls(path)
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
    def _key_path(self) -> Path:
        return self.path / "key"

    def key(self) -> bytes:
        found = self._key_path.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or found.st_size != KEY_BYTES:
            raise PermissionError(
                f"{self._key_path} must be {KEY_BYTES} bytes that only you can read; remove it to get a new one"
            )
        return self._key_path.read_bytes()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def member_rendezvous() -> Path:
    """Where the ranks of this host's supervisor meet."""
    return PrivateDirectory(Path(os.environ[CONTROL_DIRECTORY])).ranks
