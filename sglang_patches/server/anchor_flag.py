"""``--eep-anchor``: where the weights of this server are when it starts again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from eep.access import NotPrivate, check_private
from eep.anchor.anchor import AnchorGone, list_held
from sglang_patches.options import AnchorOptions


def add_anchor_flag(add: Callable[..., object]) -> None:
    add(
        "--eep-anchor",
        metavar="DIR",
        default=None,
        help="The directory of an 'eep anchor serve': weights stay there when this server ends, and the next one that is "
        "started alike takes them over (default: none).",
    )


def parse_anchor(given: str | None, *, keeps_weights: bool) -> AnchorOptions | None:
    """SystemExit if no anchor serves there."""
    if given is None:
        return None
    if not keeps_weights:
        raise SystemExit("--eep-anchor is for weights that are kept: give --eep-keep-weights on too, or leave it out")
    directory = Path(given).resolve()
    try:
        check_private(directory)
        list_held(directory)
    except (AnchorGone, FileNotFoundError):
        raise SystemExit(
            f"--eep-anchor {given}: no anchor serves there; run 'eep anchor serve --dir {given}', or leave it out"
        ) from None
    except NotPrivate as error:
        raise SystemExit(f"--eep-anchor {given}: {error}") from None
    # Seconds, so that a later server has a higher number: what it has held an earlier one can no longer replace.
    return AnchorOptions(directory=str(directory), server=int(time.time()))
