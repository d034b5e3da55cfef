"""The restoring of contexts switched off and on in a running server, for the bench of long contexts alone.

This file is an SGLang plugin of its own, which :class:`Switch` puts beside a server. While restoring is off, a request of a
lost rank is computed from its first token, as it is wherever its context cannot be had. All else stays as it is: caches are
in anchored memory, ranks note how far their requests are, and the front end says who served a request last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.common.server_switch import ServerSwitch, find_switch

OFF_BY_SWITCH = "restoring is switched off"
"""Why a context is computed, as the log of a rank says."""
_MODULE = "bench.context.restore_switch"
_ON, _OFF = 0, 1


class Switch(ServerSwitch):
    """In the bench: whether contexts are restored."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _MODULE)

    def set(self, *, restored: bool) -> None:
        self.turn(_ON if restored else _OFF)


def register() -> None:
    """In every process of the server."""
    found = find_switch()
    if found is None:
        return
    switch, _ = found
    from sglang_patches.rank.kv import restore

    original = restore._restore

    def either(*arguments: Any) -> int:
        if switch[0] == _OFF:
            raise restore.NoRestore(OFF_BY_SWITCH)
        return original(*arguments)

    restore._restore = either
