"""What a server needs of its machine: descriptors and shared memory. Too little of either is refused at start.

Without this a process would end later, in the middle of other work: with "Too many open files", or with SIGBUS when it
writes to a file for which there is no room.
"""

from __future__ import annotations

import logging
import os
import resource

logger = logging.getLogger(__name__)

_PLENTY = 65535
"""What SGLang asks for. Where the hard limit is lower, SGLang leaves the soft one as it is."""
_ROOM = 1 << 20
_ROOM_PER_RANK = 64 << 10
"""SGLang keeps 16 KiB there for each rank. EEP's own memory has no name anywhere and takes no room there."""
_DESCRIPTORS = 64
_DESCRIPTORS_PER_RANK = 28
"""A rank of two has 57 open, one of four 111, and the controller as many. Each client takes one of the front end."""


def require_limits(ranks: int) -> None:
    """Raises the limit of descriptors as far as it may. SystemExit if a server of ``ranks`` has too little of anything."""
    most = raise_descriptors()
    if most < (least := _DESCRIPTORS + _DESCRIPTORS_PER_RANK * ranks):
        raise SystemExit(
            f"--ep-backend eep needs {least} open files in a process for {ranks} ranks, and may have {most}; raise the "
            "limit ('ulimit -Hn', LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
        )
    room = free_shared_memory()
    if room is not None and room < (least := _ROOM + _ROOM_PER_RANK * ranks):
        raise SystemExit(
            f"--ep-backend eep: /dev/shm has {room >> 10} KiB left, and {least >> 10} KiB are needed for {ranks} ranks; "
            "enlarge it ('mount -o remount,size=64m /dev/shm', --shm-size of a container), or remove files there that no "
            "process uses"
        )


def raise_descriptors() -> int:
    """The limit of descriptors of this process, and of those that it starts, from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _PLENTY if hard == resource.RLIM_INFINITY else min(hard, _PLENTY)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return most


def free_shared_memory() -> int | None:
    """How many bytes this user may still write there; None where that is not known."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
