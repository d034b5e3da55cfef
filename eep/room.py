"""Room in a private directory: which errors say that there is none, and saying so once.

A disk that is full or read-only must not end a process that could do without its file. What cannot be written is held in
memory, or left out; the log says once what the operator is to free, and once more when files can be written again.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from pathlib import Path

_NO_ROOM = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO, errno.ENOMEM}
)


def is_want_of_room(error: OSError) -> bool:
    """Whether ``error`` says that a file cannot be written here now, and may be writable later."""
    return error.errno in _NO_ROOM


def why_no_file(directory: Path) -> OSError | None:
    """Why no file can be made in ``directory`` now, or None if one can."""
    try:
        descriptor, path = tempfile.mkstemp(dir=directory, prefix=".room-")
        os.close(descriptor)
        os.unlink(path)
    except OSError as error:
        return error
    return None


def advice(directory: Path, error: OSError) -> str:
    """What the operator is to do."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return (
        f"a file in {directory} cannot be written ({reason}); free space and inodes there ('df {directory}', "
        f"'df -i {directory}'), or make it writable"
    )


class RoomNotice:
    """One warning when files cannot be written any more, one line when they can. It never raises."""

    def __init__(self, logger: logging.Logger, directory: Path, meanwhile: str) -> None:
        """``meanwhile``: what goes on, or does not, until there is room."""
        self._logger, self._directory, self._meanwhile = logger, directory, meanwhile
        self.lacks = False

    def lacking(self, error: OSError) -> bool:
        """Say so, unless it was said. True the first time."""
        if self.lacks:
            return False
        self.lacks = True
        self._logger.warning("eep: %s. Until then %s", advice(self._directory, error), self._meanwhile)
        return True

    def found(self) -> bool:
        """There is room. True if there was none before."""
        if not self.lacks:
            return False
        self.lacks = False
        self._logger.warning("eep: files in %s can be written again", self._directory)
        return True
