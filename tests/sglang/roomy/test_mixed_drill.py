"""Requests of every kind and many lengths, while ranks are killed at random: as ``eep drill`` does it."""

from __future__ import annotations

from eep.drill.mixed_drill import DrillPlan, drill_server
from eep.drill.query_answers import put
from eep.drill.random_faults import FaultMix
from eep.drill.request_mix import Query, RequestMix
from eep.drill.sglang_server import Server
from eep.drill.step_search import read_steps
from tests.sglang.drills import wait_for

BODY = {
    "input_ids": [5, 6, 7],
    "stream": True,
    "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
}
PLAN = DrillPlan(
    seconds=12,
    steady=4,
    clients=8,
    mix=RequestMix(4, ((0.7, 3, 30), (0.3, 40, 120)), (20,), answers=(4, 20)),
    fault_mix=FaultMix(gap=(1.0, 4.0), weights={"kill-1": 2.0, "kill-2": 1.0, "joiner": 1.0}, joining=(0.1, 2.0)),
)


def test_ranks_write_down_which_requests_a_step_had(roomy: Server) -> None:
    assert roomy.directory is not None
    answer = put(roomy.url, Query(0, "greedy", "/generate", BODY, (5, 6, 7), 4), name="written-down")
    assert not answer.problem
    place = roomy.directory.parent / "steps"

    def places() -> list[int]:
        steps = [step for of_process in read_steps(place) for step in of_process]
        return [place for step in steps for name, place in step.rows if name == "written-down"]

    # A prefill, a decode step for each further token, and the one that SGLang launches before it knows that it was the last:
    # that one may be written down after the client has its answer.
    wait_for(lambda: places() == [0, 1, 2, 3, 4], "five steps are written down", within=30)


def test_requests_of_every_kind_survive_random_faults(roomy: Server) -> None:
    assert roomy.directory is not None
    result = drill_server(PLAN, roomy.url, roomy.directory, print)
    assert result["failed"] == []
    assert result["wrong"] == []
    assert result["references"]["unsteady"] == []
    assert result["all_back"], roomy.log[-3000:]
    assert result["faults"], "a drill without a fault tests nothing"
    assert result["requests"] > 0
