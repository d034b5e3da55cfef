"""Which versions of SGLang have routers that read before they wait, by their sources: the kernels run on a GPU only."""

from __future__ import annotations

import ast

import pytest

from sglang_patches import targets
from sglang_patches.cuda.routers import RADIX, TRITON
from tests.sglang_patches.test_targets import VERSIONS, sources


@pytest.mark.parametrize("version", VERSIONS)
def test_routers_are_launched_the_usual_way_where_they_read_before_they_wait(version: str) -> None:
    triton = sources(version) / "kernels/ops/moe/moe_fused_gate.py"
    radix = sources(version) / "kernels/jit/csrc/moe/route_radix.cuh"
    early = [triton_reads_early(triton.read_text()), radix_reads_early(radix.read_text())]
    assert [targets.exists_in(name, version) for name in (TRITON, RADIX)] == early


def triton_reads_early(source: str) -> bool:
    """Whether the kernel loads anything before its wait."""
    kernel = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_router_triton_kernel"
    )
    calls = sorted((node for node in ast.walk(kernel) if isinstance(node, ast.Call)), key=lambda call: call.lineno)
    names = [ast.unparse(call.func) for call in calls]
    return "tl.load" in names[: names.index("tl.extra.cuda.gdc_wait")]


def radix_reads_early(source: str) -> bool:
    """Whether the first load of the bias stands before the first wait."""
    return source.index("bias_vec.load(") < source.index("PDLWaitPrimary<kUsePDL>()")
