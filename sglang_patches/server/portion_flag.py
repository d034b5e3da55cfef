"""``--eep-portion-tokens``: how many tokens of each rank cross at once, which decides how large the regions of ranks are."""

from __future__ import annotations

from collections.abc import Callable

from eep.abi.native import MAX_TOKENS


def add_portion_flag(add: Callable[..., object]) -> None:
    add(
        "--eep-portion-tokens",
        type=int,
        metavar="N",
        default=None,
        help="How many tokens of each rank cross at once. A step in which a rank has more goes through every layer in "
        "portions. Memory for the exchange grows with N times ranks; 'eep size' says how much it is (default: a whole step, "
        "or as many as 4 GiB have room for).",
    )


def parse_portion(asked: int | None) -> int | None:
    """SystemExit if there can be no such portion."""
    if asked is not None and not 1 <= asked <= MAX_TOKENS:
        raise SystemExit(f"--eep-portion-tokens {asked}: give a number of tokens from 1 to {MAX_TOKENS}")
    return asked
