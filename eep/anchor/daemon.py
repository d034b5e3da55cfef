"""``eep anchor serve``: holds memory for servers that come and go, until it is told to let go.

It has no GPU open and never looks into what it holds. The directory is private to its user.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from eep.access import check_socket_path, make_private
from eep.anchor.anchor import SOCKET, AnchorGone, list_held
from eep.anchor.memory_holder import MemoryHolder


def serve(directory: Path) -> None:
    """Until SIGTERM or SIGINT. FileExistsError if another daemon serves there."""
    make_private(directory)
    path = check_socket_path(directory / SOCKET)
    try:
        list_held(directory)
    except AnchorGone:
        pass
    else:
        raise FileExistsError(f"another 'eep anchor serve' holds memory in {directory}; stop it, or name another --dir")
    told, tell = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(tell, b"."))
    holder = MemoryHolder(path)
    print(f"eep: anchor in {directory}, process {os.getpid()}", flush=True)
    try:
        holder.wait(told)
    finally:
        os.unlink(path)
