"""``--eep-kv-backup``: how much host memory the copies of contexts may take."""

from __future__ import annotations

import os
from collections.abc import Callable

from eep.byte_size import parse_size


def add_backup_flag(add: Callable[..., object]) -> None:
    add(
        "--eep-kv-backup",
        metavar="SIZE",
        default=None,
        help="Copy the contexts of requests to host memory as they grow, into SIZE bytes at most (16GiB, 500MB), which all "
        "ranks of the host share evenly. So they come along from a GPU that is lost, too (default: off).",
    )


def parse_backup(given: str | None, *, keeps_context: bool) -> int:
    """Bytes; 0 for none. SystemExit if it is no size, or not one that this host can have."""
    if given is None:
        return 0
    try:
        size = parse_size(given)
    except ValueError:
        raise SystemExit(f"--eep-kv-backup {given!r} is not a size; write it as in 16GiB or 500MB") from None
    if size < 1:
        raise SystemExit(f"--eep-kv-backup {given}: give more than 0 bytes, or leave it out")
    if not keeps_context:
        raise SystemExit(
            "--eep-kv-backup does not go together with --eep-keep-context off: what is copied is found by what is kept; "
            "leave out one of them"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise SystemExit(
            f"--eep-kv-backup {given} is more than the memory of this host, {memory / 2**30:.1f} GiB; give less"
        )
    return size
