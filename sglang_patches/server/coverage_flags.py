"""``--eep-on-lost-coverage`` and what goes with it: what a server does when the ranks that are left lack experts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from sglang_patches.options import OnLostCoverage


def add_coverage_flags(add: Callable[..., Any]) -> None:
    add(
        "--eep-on-lost-coverage",
        choices=("refuse", "mask", "make-room"),
        default=None,
        help="What to do when the slots that are left cannot hold every expert: 'refuse' waits for a rank to come back, "
        "'mask' serves without the least used experts, 'make-room' has every rank that is left give memory of its KV cache "
        "to more slots until ranks are back (default: refuse).",
    )
    add(
        "--eep-room-ranks",
        type=int,
        metavar="N",
        default=None,
        help="With --eep-on-lost-coverage make-room: N ranks that are left are still to hold every expert. A rank has "
        "addresses for so many slots (default: 1).",
    )
    add(
        "--eep-mask-after-ms",
        type=float,
        metavar="MS",
        default=None,
        help="With --eep-on-lost-coverage mask: how long ranks wait for experts that must come from a backup or from disk. "
        "Then they serve without them, bring them in behind their steps, and mark the requests that were computed meanwhile "
        "(default: until all are there).",
    )


def parse_room(arguments: argparse.Namespace, on_lost_coverage: OnLostCoverage, experts: int | None, slots: int) -> int:
    """For how many slots a rank has addresses; 0: for the ``slots`` that it has. SystemExit if the flags do not go
    together."""
    ranks = getattr(arguments, "eep_room_ranks", None)
    if on_lost_coverage != "make-room":
        if ranks is not None:
            raise SystemExit(
                "--eep-room-ranks needs --eep-on-lost-coverage make-room: without it no rank gets more slots; add it, or "
                "leave out both"
            )
        return 0
    ranks = 1 if ranks is None else ranks
    for is_wrong, why in (
        (
            arguments.eep_keep_context == "off",
            "it does not go together with --eep-keep-context off: only a cache that outlives its rank can give up memory",
        ),
        (
            getattr(arguments, "enable_eplb", False),
            "it does not go together with --enable-eplb: experts would move to slots that are not open; leave out one of the "
            "two",
        ),
        (
            not 1 <= ranks <= arguments.tp_size,
            f"--eep-room-ranks {ranks} is not from 1 to --tp-size, {arguments.tp_size}",
        ),
        (
            experts is None,
            "the number of experts cannot be read from the configuration of this model: use refuse or mask",
        ),
    ):
        if is_wrong:
            raise SystemExit(f"--eep-on-lost-coverage make-room: {why}")
    assert experts is not None
    return max(slots, -(-experts // ranks))


def parse_coverage(arguments: argparse.Namespace, repair_timeout_s: float) -> tuple[OnLostCoverage, float | None]:
    """What to do, and after how many seconds. SystemExit if the flags do not go together."""
    on_lost_coverage: OnLostCoverage = arguments.eep_on_lost_coverage or "refuse"
    after = getattr(arguments, "eep_mask_after_ms", None)
    if after is None:
        return on_lost_coverage, None
    if on_lost_coverage != "mask":
        raise SystemExit(
            "--eep-mask-after-ms needs --eep-on-lost-coverage mask: without it no expert is masked; add it, or leave out both"
        )
    if not 0 <= after < 1000 * repair_timeout_s:
        raise SystemExit(
            f"--eep-mask-after-ms {after:g}: give 0 or more, and less than --eep-repair-timeout-s, "
            f"{1000 * repair_timeout_s:g} ms"
        )
    return on_lost_coverage, after / 1000
