"""What a progress bar would leave behind."""

from __future__ import annotations


def leave_no_lock() -> None:
    """A progress bar makes a lock that has a name in shared memory, once in a process; one that is killed leaves it there."""
    import threading

    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
