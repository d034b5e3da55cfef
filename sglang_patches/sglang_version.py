"""Which version of SGLang is installed, and which the plugin was run with."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache

OLDEST, NEWEST = "0.5.17", "0.5.23"
"""The plugin was run with these versions and some between them."""


@cache
def installed() -> str:
    return importlib.metadata.version("sglang")


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers that compare. What follows the third is left out."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:3])
