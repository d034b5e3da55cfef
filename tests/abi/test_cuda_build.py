"""The CUDA library where there is no GPU: it builds, and its PTX says what cannot be seen on a single GPU."""

from __future__ import annotations

import ctypes
import pathlib
import re
import shutil
import subprocess

import pytest

from eep.abi import native
from eep.abi.peer_table import MAX_CUDA_RANKS

ROOT = pathlib.Path(__file__).parents[2]
CROSSING = (
    *("dispatch", "combine", "barrier", "landing"),
    *("collective_move", "collective_reduce", "collective_reduce_far"),
)
"""Files of kernels that signal to other ranks."""
KERNELS = (*CROSSING, "pack", "publish", "weights")

pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which is not installed"),
    pytest.mark.timeout(900),  # the first test compiles for all
]


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ptx")
    texts = {}
    for kernel in KERNELS:
        to = folder / f"{kernel}.ptx"
        command = ["nvcc", "-ptx", "-arch=sm_90", "-std=c++20", "-I", "eep_cuda/include", "-I", "eep_cuda/src"]
        subprocess.run([*command, f"eep_cuda/src/cuda/{kernel}.cu", "-o", to], cwd=ROOT, check=True, timeout=280)
        texts[kernel] = to.read_text()
    return texts


@pytest.mark.parametrize("kernel", CROSSING)
def test_words_that_cross_ranks_are_of_system_scope(ptx: dict[str, str], kernel: str) -> None:
    """Flags are stored after a system fence and loaded with acquire.sys. Only the verdict stays on the GPU."""
    text = ptx[kernel]
    word = "b128" if kernel == "dispatch" else "u64"  # a dispatch sends its envelope in one word with the flag
    assert re.search(rf"\bld\.acquire\.sys\.global\.{word}", text)
    assert re.search(rf"\bst\.(relaxed|release)\.sys\.global\.{word}", text)
    if kernel != "barrier":  # whose flag is a release store by itself
        assert "fence.acq_rel.sys" in text
    narrower = set(re.findall(r"\b(?:ld|st)\.(?:acquire|release|relaxed)\.(?:gpu|cta)\.global\.\w+", text))
    assert narrower <= ({"ld.acquire.gpu.global.u64", "st.release.gpu.global.u64"} if kernel == "dispatch" else set())


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_traps(ptx: dict[str, str], kernel: str) -> None:
    """A trap in one process would end every process that shares the GPU."""
    assert not re.search(r"\b(trap|brkpt|exit\.err)\b", ptx[kernel])
    assert "__assertfail" not in ptx[kernel]


def test_both_backends_export_the_same_functions() -> None:
    """A process that loads one can load the other. Needs no driver: nothing of CUDA is called."""
    for backend in ("cpu", "cuda"):
        assert native.load(backend).eep_abi_version() == native.ABI_VERSION


def test_a_gpu_refuses_more_ranks_than_its_kernels_know() -> None:
    """Before memory is asked for, and before anything of CUDA is called."""
    library, layout = native.load("cuda"), native.RegionLayout()
    shape = native.Shape(max_ranks=MAX_CUDA_RANKS, max_tokens=1, hidden=16, max_topk=1, local_experts=1, channels=1)
    native.check(library, library.eep_region_layout_compute(shape, layout))
    shape.max_ranks += 1
    with pytest.raises(ValueError, match=r"between 1 and 64, got 65 \(a CPU serves up to 512, a GPU up to 64\)"):
        native.check(library, library.eep_region_layout_compute(shape, layout))
    assert library.eep_create(shape, 0, 4096, 4096, ctypes.c_void_p()) != 0
