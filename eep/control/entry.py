"""``python -m eep.control.entry module:function``: runs one function as a rank process."""

from __future__ import annotations

import importlib
import sys


def main(name: str) -> None:
    module, _, path = name.partition(":")
    target: object = importlib.import_module(module)
    for part in path.split("."):
        target = getattr(target, part)
    if not callable(target):
        raise SystemExit(f"{name} is not a function")
    target()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m eep.control.entry module:function")
    main(sys.argv[1])
