"""What a mixed load makes of answers that do not come token by token."""

from __future__ import annotations

from eep.drill.mixed_load import MixedLoad
from eep.drill.query_answers import Answer
from eep.drill.references import Reference
from eep.drill.request_mix import Query


def test_an_answer_that_comes_whole_is_no_gap_between_tokens() -> None:
    known = [
        Reference(Query(number, "any", "/generate", {"stream": not number}), Answer(number, 0.0)) for number in (0, 1)
    ]
    load = MixedLoad("http://127.0.0.1:9", known, 1, seed=1)
    streamed, whole = Answer(0, 10.0), Answer(1, 10.0)
    streamed.times, whole.times = [10.5, 10.6], [14.0]
    load.answers += [streamed, whole]
    assert load.largest_gap(10.0, 15.0) == 0.5
