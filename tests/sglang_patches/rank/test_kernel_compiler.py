"""Triton is heard when it compiles."""

from __future__ import annotations

import pytest

from sglang_patches.rank import kernel_compiler

triton = pytest.importorskip("triton", reason="Triton comes with SGLang")


@triton.jit
def nothing() -> None:
    pass


def test_a_rank_hears_that_triton_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    source, heard = triton.compiler.ASTSource, list[str]()
    monkeypatch.setattr(source, "__init__", source.__init__)
    kernel_compiler.tell(lambda: heard.append("compiles"))
    assert not heard
    read = source(nothing, {}, {}, {})
    assert heard == ["compiles"]
    assert read.fn is nothing
