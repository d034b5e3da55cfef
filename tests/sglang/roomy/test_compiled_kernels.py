"""A rank on a CPU compiles nothing: torch would compile in the middle of a step, into files that all ranks share."""

from __future__ import annotations

from eep.drill.sglang_server import Server
from tests.sglang.roomy.request_kinds import GREEDY, Asking


def test_a_penalty_that_torch_would_compile_leaves_no_file_that_a_kill_could_cut(roomy: Server) -> None:
    assert roomy.directory is not None
    compiled = roomy.directory.parent / "compiled"
    replies = [Asking(roomy, GREEDY["repetition penalty"], rank).result() for rank in range(4)]
    assert [reply.problem for reply in replies] == [""] * 4
    assert [path for path in compiled.rglob("*") if path.is_file()] == []
