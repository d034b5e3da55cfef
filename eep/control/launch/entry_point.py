"""``python -m eep.control.launch.entry_point module:function``: runs one function as a rank process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def find(name: str) -> Callable[..., Any]:
    """The function that is called ``module:function``."""
    module, _, path = name.partition(":")
    target: object = importlib.import_module(module)
    for part in path.split("."):
        target = getattr(target, part)
    if not callable(target):
        raise SystemExit(f"{name} is not a function")
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m eep.control.launch.entry_point module:function")
    find(sys.argv[1])()
