"""Progress bars would leave files in shared memory."""

from __future__ import annotations


def leave_no_lock() -> None:
    """A progress bar makes a named lock in shared memory, once in a process. A process that is killed leaves it there."""
    import threading

    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
