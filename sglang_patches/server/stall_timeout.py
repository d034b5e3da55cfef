"""How long a rank may make no progress: ``--eep-stall-timeout-s``."""

from __future__ import annotations

from sglang_patches.rank.patience import between_steps_ms

DEFAULT_S = 60.0
_WAITS = 2
"""A rank that waits for a hung peer makes no progress either. Its suspicion must come first, so that the peer goes alone."""


def choose_stall_timeout(asked: float | None, timeout_ms: float) -> float:
    """Seconds, 0 for no limit. SystemExit if ``asked`` is less than what ranks need to suspect each other."""
    least = _WAITS * between_steps_ms(timeout_ms) / 1000
    if asked is None:
        return max(DEFAULT_S, least)
    if asked != 0 and not least <= asked < 1e6:
        raise SystemExit(
            f"--eep-stall-timeout-s {asked:g}: give 0 to turn it off, or {least:g} s or more (and less than 1e6): a rank "
            f"waits for a peer for {least / _WAITS:g} s before it suspects the peer, and makes no progress meanwhile"
        )
    return asked
