"""The plans that are kept can be done, and those with long contexts have them."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

from eep.drill.cases import CASES
from eep.drill.devices import DEVICES
from eep.drill.mixed_drill import RANKS, DrillPlan, _arguments, _complaints, _contexts, _prepared
from eep.drill.models.checkpoint import CONTEXT
from eep.drill.random_faults import STOP
from eep.drill.request_mix import REQUEST_MIXES, Query, make_queries

LONG = {"contexts-32": 3000, "contexts-cpu": 300}
"""Those with long contexts, and how many tokens at least a third of their prompts have."""


def queries(plan: DrillPlan) -> list[Query]:
    return make_queries(plan.mix or REQUEST_MIXES[plan.device], plan.seed)


def last(arguments: tuple[str, ...], flag: str) -> int:
    """SGLang takes the last of those that are given twice."""
    return int([value for name, value in pairwise(arguments) if name == flag][-1])


@pytest.mark.parametrize("name", CASES)
def test_every_request_fits_the_model(name: str) -> None:
    assert max(len(query.prompt) + query.tokens for query in queries(CASES[name]) if query.prompt) < CONTEXT


@pytest.mark.parametrize("name", LONG)
def test_long_contexts_are_killed_with_a_prefix_cache(name: str) -> None:
    plan = CASES[name]
    lengths = [len(query.prompt) for query in queries(plan) if query.prompt]
    assert sum(length >= LONG[name] for length in lengths) * 3 >= len(lengths)
    assert plan.seconds > 0
    assert STOP not in plan.fault_mix.weights, "only kills"
    assert plan.needs_contexts
    assert "--disable-radix-cache" not in _prepared(plan, DEVICES[plan.device]).flags


@pytest.mark.parametrize("name", LONG)
def test_the_last_rank_has_room_for_what_all_clients_ask(name: str) -> None:
    plan = CASES[name]
    arguments = (*DEVICES[plan.device].flags, *_arguments(plan))
    sizes = sorted(len(query.prompt) + query.tokens for query in queries(plan) if query.prompt)
    assert plan.clients * sum(sizes) / len(sizes) < last(arguments, "--max-total-tokens")
    assert sum(sizes) > last(arguments, "--max-total-tokens") / (1 if plan.device == "cuda" else RANKS)


def test_contexts_that_came_along_are_counted_by_the_log() -> None:
    log = (
        "[DP1] request a~1 has 2059 of 2060 tokens from rank 2\n"
        "[DP1] request b~1 has 992 of 1000 tokens from the host copy of rank 2\n"
        "[DP0] the context of request c~1 is computed again, 90 tokens: rank 0 has noted nothing of it\n"
    )
    assert _contexts(log) == {"contexts": 2, "context_tokens": 3051, "contexts_computed": 1}


@pytest.mark.parametrize(
    ("needs", "contexts", "said"), [(True, 0, 1), (True, 3, 0), (False, 0, 0)], ids=["none", "some", "not needed"]
)
def test_a_drill_of_contexts_needs_contexts(needs: bool, contexts: int, said: int) -> None:
    result: dict[str, Any] = {
        **dict.fromkeys(("failed_count", "wrong_count", "lost_unasked", "silences", "left_over"), 0),
        "references": {"unsteady": []},
        "all_back": True,
        "plan": asdict(DrillPlan(needs_contexts=needs)),
        "log": {"contexts": contexts, "contexts_computed": 4},
    }
    assert len(_complaints(result)) == said
