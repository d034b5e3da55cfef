"""The library of a backend: where it is found, how it is loaded, and what its return codes mean.

Pure ctypes; no torch. A negative return code becomes a Python exception with the library's own sentence. Functions that
take a context are called through :class:`eep.abi.context.NativeContext`. The functions are in :mod:`eep.abi.functions`, the
structures in :mod:`eep.abi.structures`; what others need of both is shown here too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import sys
from typing import cast

from eep.abi.functions import PROTOTYPES, NativeLibrary
from eep.abi.library_file import why_not_loaded
from eep.abi.structures import (
    BENCH_AT_ONCE,
    BENCH_FIXED_MEMBERSHIP,
    BENCH_STAMPS,
    BENCH_UNCHECKED,
    BENCH_UNCLOSED,
    BENCH_UNFENCED,
    BENCH_WIDE,
    LAYOUTS,
    MAX_TOKENS,
    MAX_TOPK,
    SCALE_GROUP,
    STAMPED_BLOCKS,
    TYPES,
    BlockStamps,
    CombineRecvArgs,
    CombineSendArgs,
    DispatchRecvArgs,
    DispatchSendArgs,
    ErrorCode,
    Mailbox,
    RegionLayout,
    Shape,
)
from eep.errors import EepError, EpochRevoked

__all__ = [
    "ABI_VERSION",
    "BENCH_AT_ONCE",
    "BENCH_FIXED_MEMBERSHIP",
    "BENCH_STAMPS",
    "BENCH_UNCHECKED",
    "BENCH_UNCLOSED",
    "BENCH_UNFENCED",
    "BENCH_WIDE",
    "LAYOUTS",
    "MAX_TOKENS",
    "MAX_TOPK",
    "SCALE_GROUP",
    "STAMPED_BLOCKS",
    "TYPES",
    "BlockStamps",
    "CombineRecvArgs",
    "CombineSendArgs",
    "DispatchRecvArgs",
    "DispatchSendArgs",
    "Mailbox",
    "NativeLibrary",
    "RegionLayout",
    "Shape",
    "check",
    "load",
]

ABI_VERSION = 10

_ERRORS: dict[int, type[Exception]] = {
    ErrorCode.ERROR_ARGUMENT: ValueError,
    ErrorCode.ERROR_PHASE: EepError,
    ErrorCode.ERROR_VIEW: EpochRevoked,
    ErrorCode.ERROR_MISMATCH: ValueError,
}


def _find(name: str) -> pathlib.Path:
    # An editable install has the package in two places: the sources, and what pip has built, which may be older than
    # what "make build" has put beside the sources.
    packages = dict.fromkeys([pathlib.Path(__file__).parent.parent, *map(pathlib.Path, sys.modules["eep"].__path__)])
    places = [package / "lib" for package in packages]
    if override := os.environ.get("EEP_LIBRARY_DIR"):
        places.insert(0, pathlib.Path(override))
    for place in places:
        if (path := place / name).exists():
            return path
    raise EepError(
        f"{name} was not found in {', '.join(map(str, places))}; install the package with pip, or run 'make build' in "
        "the source tree"
    )


@functools.cache
def load(backend: str = "cpu") -> NativeLibrary:
    """The library of a backend, with every function declared."""
    if backend not in ("cpu", "cuda"):
        raise ValueError(f"there is no data plane for device {backend!r}: use 'cpu' or 'cuda'")
    path = _find(f"libeep_{backend}.so")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise EepError(why_not_loaded(path, error)) from error
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    library = cast(NativeLibrary, loaded)
    if (found := library.eep_abi_version()) != ABI_VERSION:
        raise EepError(f"{path} speaks ABI {found}, this package speaks {ABI_VERSION}: run 'make build' again")
    return library


def check(library: NativeLibrary, code: int) -> None:
    """Raises what a negative return code stands for."""
    if code:
        raise _ERRORS.get(code, EepError)(library.eep_last_error().decode())
