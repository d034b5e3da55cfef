"""Builds FlashInfer's kernels, and the shim around them, from the sources that the package carries."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import subprocess
from ctypes import c_int, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
MOST_RANKS = 64
_SOURCES = Path("csrc/nv_internal")
_KERNELS = _SOURCES / "tensorrt_llm/kernels/communicationKernels/moeAlltoAllKernels.cu"
_OTHERS = ("cpp/common/tllmException.cpp", "cpp/common/stringUtils.cpp")
_DEFINES = (
    "NDEBUG",
    "FLASHINFER_ENABLE_F16",
    "FLASHINFER_ENABLE_BF16",
    "FLASHINFER_ENABLE_FP8_E4M3",
    "ENABLE_BF16",
    "ENABLE_FP8",
)
_FIRST_LAUNCH = "void moe_a2a_prepare_dispatch_launch("
_NARROWED = {
    "SWITCH_BOOL(flag, NAME, ...)": "constexpr bool NAME = false; __VA_ARGS__",
    "SWITCH_TOP_K(top_k, TOP_K, ...)": "constexpr int TOP_K = 8; __VA_ARGS__;",
    "SWITCH_DTYPE(dtype, TYPE, ...)": "using TYPE = __nv_bfloat16; __VA_ARGS__;",
    "SWITCH_QUANT_MODE(dtype, mode, QUANT_MODE, ...)": (
        "constexpr auto QUANT_MODE = MoeA2ACombineQuantMode::NONE; __VA_ARGS__;"
    ),
    "SWITCH_SWIZZLE_MODE(mode, SWIZZLE_MODE, ...)": (
        "constexpr auto SWIZZLE_MODE = MoeA2ACombineSwizzleSFMode::LINEAR; __VA_ARGS__;"
    ),
}
"""The one case of many that the contest needs. With all of them nvcc takes an hour, and much memory."""


class Exchange(ctypes.Structure):
    """As in shim.cu."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "ranks",
                "rank",
                "experts",
                "topk",
                "tokens",
                "hidden",
                "row_bytes",
                "scales",
                "overlaps",
                "threads",
            )
        ),
        ("workspace", c_void_p * MOST_RANKS),
        *((name, c_void_p) for name in ("x", "scale", "experts_of_tokens", "weights", "out")),
    )


class Places(ctypes.Structure):
    """As in shim.cu."""

    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            *(
                "round",
                "finished_tokens",
                "sent",
                "received",
                "dispatch_flags",
                "combine_flags",
                "target_ranks",
                "places",
            ),
            *("rows", "scales", "experts", "weights", "outputs", "end"),
        )
    )


INSTALLED = Path("the installed package")
"""Stands for the folder where Python finds the package."""


def find(package: Path) -> Path:
    """The folder of the package. SystemExit if it is to be where Python finds it, and is not."""
    if package != INSTALLED:
        return package
    # Of the package only its sources are wanted, so that it need not be one that can be imported.
    found = importlib.util.find_spec("flashinfer")
    for folder in (found and found.submodule_search_locations) or ():
        return Path(folder)
    raise SystemExit("--flashinfer: Python finds no package flashinfer; install flashinfer-python, or name its folder")


def build(package: Path, into: Path) -> Path:
    """The library, made of the sources in ``package``, the folder ``flashinfer`` of the installed or unpacked package. It is
    built once. SystemExit if it cannot be."""
    data = package / "data"
    kernels = data / _KERNELS
    if not kernels.is_file():
        raise SystemExit(
            f"--flashinfer {package}: there is no {kernels}; give the folder flashinfer of flashinfer-python"
        )
    text = kernels.read_text()
    if _FIRST_LAUNCH not in text:
        raise SystemExit(f"--flashinfer {package}: {kernels} is not as in version 0.7.2, for which this was written")
    narrowed = _narrow(text)
    shim = HERE / "shim.cu"
    name = hashlib.sha256((narrowed + shim.read_text()).encode()).hexdigest()[:16]
    into.mkdir(parents=True, exist_ok=True)
    library, source = into / f"libflashinfer-{name}.so", into / f"kernels-{name}.cu"
    if not library.exists():
        source.write_text(narrowed)
        folders = [data / "include", data / "csrc", data / _SOURCES, data / _SOURCES / "include"]
        command = [
            *(
                "nvcc",
                "-std=c++17",
                "-O3",
                "-use_fast_math",
                "-shared",
                "-Xcompiler",
                "-fPIC",
                "-Xlinker",
                "-Bsymbolic",
            ),
            *("-gencode=arch=compute_90a,code=sm_90a", "-w"),
            *(f"-D{each}" for each in _DEFINES),
            *(f"-I{each}" for each in folders),
            *(str(each) for each in (source, shim, *(data / _SOURCES / each for each in _OTHERS))),
        ]
        done = subprocess.run([*command, "-o", f"{library}.new"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"--flashinfer {package}: nvcc failed:\n{done.stderr[-2000:]}")
        Path(f"{library}.new").rename(library)
    return library


def _narrow(text: str) -> str:
    at = text.index(_FIRST_LAUNCH)
    macros = "".join(
        f"#undef {head.partition('(')[0]}\n#define {head} {{ {body} }}\n" for head, body in _NARROWED.items()
    )
    return text[:at] + "\n" + macros + text[at:]


@cache
def load(library: Path) -> ctypes.CDLL:
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(library))
    exchange, places = ctypes.POINTER(Exchange), ctypes.POINTER(Places)
    for name, arguments in {
        "places_of": (exchange, places),
        "make_workspace": (c_uint64, ctypes.POINTER(c_void_p), c_void_p),
        "open_workspace": (c_void_p, ctypes.POINTER(c_void_p)),
        "close_workspace": (c_void_p,),
        "free_workspace": (c_void_p,),
        "copy_bytes": (c_void_p, c_void_p, c_uint64),
        "make_stream_on_part": (c_uint32, c_uint32, ctypes.POINTER(c_void_p)),
        "dispatch": (exchange, c_void_p),
        "combine": (exchange, c_void_p),
    }.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, c_int
    loaded.places_of.restype = None
    return loaded
