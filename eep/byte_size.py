"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes, as in 170GiB, 500MB or 4096; a K is 1024. ValueError if it is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it as in 170GiB")
    return int(float(match[1]) * _UNITS[match[2]])
