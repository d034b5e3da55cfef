"""The step behind a wrong token, found in what ranks wrote down."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eep.drill.step_search import RecordedStep, find_bad_steps, read_steps


def step(at: float, *rows: tuple[str, int], graph: bool = True, kind: str = "decode") -> RecordedStep:
    return RecordedStep(at, 3, kind, graph, rows)


STEPS = [
    step(1.0, ("a", 4), ("b", 1)),
    step(2.0, ("a", 5), ("b", 2), ("c", 0), graph=False),
    step(3.0, ("a", 6), ("b", 3), ("c", 1), ("d", 1)),
    step(4.0, ("a", 7), ("b", 4), ("c", 2), ("d", 2)),
]


def test_wrong_rows_of_a_step_are_put_together() -> None:
    (found,) = find_bad_steps([STEPS], [("c", 1), ("d", 1), ("x", 9)])
    assert (found.at, found.rank, found.rows, found.wrong_rows) == (3.0, 3, 4, (2, 3))
    assert found.graph
    assert found.rows_of_last_graph == 2, "the step in between was no graph"
    assert found.kinds_before == ("decode 2g", "decode 3")


def test_the_first_step_of_a_rank_has_no_graph_before_it() -> None:
    (found,) = find_bad_steps([STEPS], [("b", 1)])
    assert found.rows_of_last_graph is None


def test_a_line_that_a_killed_rank_did_not_finish_is_left_out(tmp_path: Path) -> None:
    line = {"at": 1.0, "rank": 0, "kind": "decode", "graph": False, "rows": [["a", 1]]}
    (tmp_path / "0.17").write_text(json.dumps(line) + "\n" + json.dumps(line)[:20])
    assert read_steps(tmp_path) == [[RecordedStep(1.0, 0, "decode", False, (("a", 1),))]]


def test_what_a_rank_writes_down_can_be_read(tmp_path: Path) -> None:
    from sglang_patches.rank.step_record import describe_step

    mode: Any = SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True)
    requests = [SimpleNamespace(rid="a", output_ids=[]), SimpleNamespace(rid="b", output_ids=[1, 2])]
    told = describe_step(2, SimpleNamespace(forward_mode=mode, reqs=requests), SimpleNamespace(can_run_cuda_graph=True))
    (tmp_path / "2.1").write_text(json.dumps(told) + "\n")
    ((read,),) = read_steps(tmp_path)
    assert (read.rank, read.kind, read.graph, read.rows) == (2, "extend", True, (("a", 0), ("b", 2)))
