"""Letting go of the memory of ranks that left, beside the steps of those that stay."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from eep.data_plane.memory.exchange import Offer

_UNMAPPED_WITHIN_S = 10.0


class Unmapping:
    """Memory is unmapped in threads of its own: a driver that clears up behind a killed process takes its time to unmap
    anything. Only :meth:`finish` waits for it."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def begin(self, left: Sequence[Offer], rank: int) -> None:
        """Lets go of what ``rank`` has mapped of peers."""
        if not left:
            return
        held = [offer.region.bytes_at(0, 1) for offer in left]
        for offer in left:
            offer.close()
        thread = threading.Thread(target=held.clear, name=f"eep-unmap-{rank}", daemon=True)
        thread.start()
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def finish(self) -> None:
        for thread in self._threads:
            thread.join(_UNMAPPED_WITHIN_S)
