"""How long a rank may make no progress, and how long it may sleep or compute without a reason: ``--eep-stall-timeout-s`` and
``--eep-hang-timeout-s``."""

from __future__ import annotations

from collections.abc import Callable

from sglang_patches.rank.patience import between_steps_ms

DEFAULT_S = 60.0
_HANG_S = 0.5
_LEAST_HANG_S = 0.3
"""Three looks of the supervisor."""
_WAITS = 2
"""A rank that waits for a hung peer makes no progress either. Its suspicion must come first, so that the peer goes alone."""


def add_stall_flags(add: Callable[..., object]) -> None:
    add(
        "--eep-stall-timeout-s",
        type=float,
        metavar="S",
        default=None,
        help="How long a rank that runs or repairs may make no progress, and one that starts may do nothing at all, before "
        "the supervisor relaunches it; 0: for ever (default: 60, or twice as long as a rank waits for a peer).",
    )
    add(
        "--eep-hang-timeout-s",
        type=float,
        metavar="S",
        default=None,
        help="How long a rank that runs may sleep, though it waits for no peer, no device and no other program, or compute "
        "by itself where no rank prefills more than 64 tokens, before the supervisor relaunches it; 0: for ever "
        "(default: 0.5).",
    )


def choose_hang_timeout(asked: float | None) -> float:
    """Seconds, 0 for no limit."""
    if asked is None:
        return _HANG_S
    if asked != 0 and not _LEAST_HANG_S <= asked < 1e6:
        raise SystemExit(
            f"--eep-hang-timeout-s {asked:g}: give 0 to turn it off, or {_LEAST_HANG_S:g} s or more (and less than 1e6)"
        )
    return asked


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
