"""The restoring of contexts switched off and on in a running server, for the bench of long contexts alone.

This file is an SGLang plugin of its own, which :class:`Switch` puts beside a server. While restoring is off, a request of a
lost rank is computed from its first token, as it is wherever its context cannot be had. While only the caches are out of
reach, as they are when a GPU is lost, contexts come from host memory if they are copied there. All else stays as it is:
caches are in anchored memory, ranks note how far their requests are, and the front end says who served a request last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.common.server_switch import ServerSwitch, find_switch

OFF_BY_SWITCH = "restoring is switched off"
"""Why a context is computed, as the log of a rank says."""
NO_CACHES_BY_SWITCH = "the caches of lost ranks are switched off"
_MODULE = "bench.context.restore_switch"
_ON, _OFF, _NO_CACHES = 0, 1, 2


class Switch(ServerSwitch):
    """In the bench: whether contexts are restored."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _MODULE)

    def set(self, *, restored: bool, caches: bool = True) -> None:
        """``caches``: those of lost ranks can be reached."""
        self.turn((_ON if caches else _NO_CACHES) if restored else _OFF)


def register() -> None:
    """In every process of the server."""
    found = find_switch()
    if found is None:
        return
    switch, _ = found
    from sglang_patches.rank.kv import lost_pool, restore

    original, reached = restore._restore, lost_pool.get_lost_pool

    def either(*arguments: Any) -> tuple[restore.LostContext, int]:
        if switch[0] == _OFF:
            raise restore.NoRestore(OFF_BY_SWITCH)
        return original(*arguments)

    def reach(*arguments: Any) -> lost_pool.LostPool:
        if switch[0] == _NO_CACHES:
            raise restore.NoRestore(NO_CACHES_BY_SWITCH)
        return reached(*arguments)

    restore._restore, lost_pool.get_lost_pool = either, reach
