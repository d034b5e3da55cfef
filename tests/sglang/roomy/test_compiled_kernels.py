"""A rank on a CPU compiles nothing: torch would compile in the middle of a step, into files that all ranks share."""

from __future__ import annotations

from eep.drill.sglang_server import Server
from tests.sglang.roomy.request_kinds import Asking, native


def test_a_penalty_that_torch_would_compile_leaves_no_file_that_a_kill_could_cut(roomy: Server) -> None:
    assert roomy.directory is not None
    compiled = roomy.directory.parent / "compiled"
    kind = native(repetition_penalty=1.3, max_new_tokens=4)
    replies = [asking.result() for asking in [Asking(roomy, kind, rank) for rank in range(4)]]
    assert [reply.problem for reply in replies] == [""] * 4
    assert [path for path in compiled.rglob("*") if path.is_file()] == []
