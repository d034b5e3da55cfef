"""Finds the package nvidia-nvshmem-cu13, and builds the exchange through it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
import subprocess
from ctypes import c_int, c_int32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("puts.cu")
_HOST = "lib/libnvshmem_host.so.3"
_DEVICE = "lib/libnvshmem_device.a"
_VERSION = "include/non_abi/nvshmem_version.h"
_NEEDED = ("include/nvshmem.h", _VERSION, _HOST, _DEVICE, "lib/nvshmem_bootstrap_uid.so.3")
WAYS = ("puts", "warp puts", "stores")
"""In the order of ``Way`` in puts.cu."""


class PutExchange(ctypes.Structure):
    """As in puts.cu."""

    _fields_ = (
        *((name, c_int32) for name in ("ranks", "rank", "experts", "topk", "tokens", "hidden", "blocks", "way")),
        *((name, c_void_p) for name in ("heard", "answered", "round", "experts_of_rows", "weights_of_rows")),
        *((name, c_void_p) for name in ("rows", "outputs", "returned")),
        *((name, c_void_p) for name in ("x", "experts_of_tokens", "weights", "out")),
    )


def find_nvshmem(given: Path | None) -> Path:
    """The folder ``nvidia/nvshmem``: the given one, or that of the installed package. SystemExit if something is missing."""
    if given is None:
        given = _installed()
        if given is None:
            raise SystemExit(
                "--nvshmem: nvidia-nvshmem-cu13 is not installed; install it, or name the folder nvidia/nvshmem of its "
                "unpacked wheel"
            )
    if missing := [name for name in _NEEDED if not (given / name).is_file()]:
        raise SystemExit(
            f"--nvshmem {given}: there is no {missing[0]}; name the folder nvidia/nvshmem of nvidia-nvshmem-cu13"
        )
    return given.absolute()


def _installed() -> Path | None:
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # there is no package of the name nvidia
        return None
    if found is None:
        return None
    return next(map(Path, found.submodule_search_locations or ()), None)


def version_of(package: Path) -> str:
    """Such as 3.4.5."""
    text = (package / _VERSION).read_text()
    parts = (re.search(rf"NVSHMEM_VENDOR_{part}_VERSION (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH"))
    return ".".join(part[1] if part else "?" for part in parts)


def build_puts(package: Path, into: Path) -> Path:
    """The library, made of puts.cu and the headers and libraries in ``package``. It is built once. SystemExit if it cannot
    be."""
    told = f"{package} {version_of(package)}\n{_SOURCE.read_text()}"
    library = into / f"libputs-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    into.mkdir(parents=True, exist_ok=True)
    command = [
        *("nvcc", "-std=c++17", "-O3", "-rdc=true", "-shared", "-Xcompiler", "-fPIC"),
        "-gencode=arch=compute_90,code=sm_90",
        f"-I{package / 'include'}",
        *(str(_SOURCE), str(package / _DEVICE)),
        *("-Xlinker", str(package / _HOST), "-Xlinker", "-rpath", "-Xlinker", str((package / _HOST).parent)),
    ]
    try:
        done = subprocess.run([*command, "-o", f"{library}.new"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit("--nvshmem: there is no nvcc, with which its kernels are built; put it on the PATH") from None
    if done.returncode:
        raise SystemExit(f"--nvshmem {package}: nvcc failed:\n{done.stderr[-2000:]}")
    Path(f"{library}.new").rename(library)
    return library


@cache
def load_puts(library: str) -> ctypes.CDLL:
    loaded = ctypes.CDLL(library)
    exchange = ctypes.POINTER(PutExchange)
    for name, answer, arguments in (
        ("id_bytes", c_uint64, ()),
        ("make_id", c_int, (c_void_p,)),
        ("start_pe", c_int, (c_void_p, c_int, c_int)),
        ("take_memory", c_void_p, (c_uint64,)),
        ("stop_pe", None, (c_void_p,)),
        ("blocks_of_a_pe", c_int, (c_int, ctypes.POINTER(c_int))),
        ("clear_words", c_int, (c_void_p, c_uint64)),
        ("copy_words", c_int, (c_void_p, c_void_p, c_uint64)),
        ("put_rows", c_int, (exchange, c_void_p)),
        ("return_rows", c_int, (exchange, c_void_p)),
    ):
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, answer
    return loaded
