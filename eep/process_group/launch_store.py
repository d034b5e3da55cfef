"""The store through which ranks were launched. Rank 0 mostly keeps it, and closes it when it leaves.

Programs end a default group and begin the next one at the same port. A rank that is sooner than rank 0 would reach the
store that rank 0 is about to close. So a rank that destroys its groups waits for that, for a moment: a store that belongs
to a launcher stays. It has been connected to the store since its groups were made, since at the same port there may be
the next one already.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any, Self

from torch._C._distributed_c10d import PrefixStore, TCPStore

_CLOSES_WITHIN_S = 1.0
_REFUSES_WITHIN_S = 0.01


class LaunchStore:
    """The store of rank 0, at ``address``."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._connection = socket.create_connection(address, timeout=_CLOSES_WITHIN_S)

    @classmethod
    def behind(cls, store: Any, rank: int) -> Self | None:
        """What rank 0 may keep for ``rank`` behind ``store``; None on rank 0, and if it is another kind of store."""
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        is_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if rank == 0 or is_of_launcher or not isinstance(store, TCPStore):
            return None
        with suppress(OSError):
            return cls((store.host, store.port))
        return None

    def wait_until_closed(self) -> None:
        """Returns when the store is closed and its port is free or taken anew, or when it seems to stay. Once only."""
        end = time.monotonic() + _CLOSES_WITHIN_S
        with self._connection as connection:
            if not _ends(connection, _CLOSES_WITHIN_S):
                return
        while time.monotonic() < end:
            try:
                with socket.create_connection(self._address, timeout=_CLOSES_WITHIN_S) as connection:
                    if not _ends(connection, _REFUSES_WITHIN_S):
                        return
            except OSError:
                return


def _ends(connection: socket.socket, within: float) -> bool:
    """Whether the other end closes ``connection``, on which neither says anything, in that time."""
    connection.settimeout(within)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
