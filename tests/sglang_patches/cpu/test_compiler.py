"""Ranks on a CPU compile nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_patches.cpu import compiler


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """What was compiled since."""
    yield []
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def test_functions_that_were_marked_before_run_as_they_are_written(compiled: list[str]) -> None:
    def note(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(str(graph.graph))
        return graph

    @torch.compile(dynamic=True, backend=note)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double(torch.ones(3))
    assert len(compiled) == 1, "torch compiled nothing, so this test tests nothing"
    compiler.switch_off()
    torch.compiler.reset()
    assert double(torch.ones(3, 3)).sum() == 18
    assert len(compiled) == 1
