"""The mark of a request that saw masked experts: from its rank through SGLang's messages to its client. Needs no SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from eep.observe.metrics import MetricsWriter
from sglang_patches import mask_mark
from sglang_patches.front_end import masked_requests
from sglang_patches.front_end.masked_requests import MaskedRequests
from sglang_patches.mask_mark import MARK, is_marked, mark, take_marks
from tests.sglang_patches.front_end.front_end_server import Server


def test_a_marked_request_has_a_mark_for_every_output_also_one_without_tokens() -> None:
    request = SimpleNamespace(customized_info={"theirs": [1, 2]})
    assert not is_marked(request)
    mark(request)
    assert is_marked(request)
    assert request.customized_info["theirs"] == [1, 2]
    marks: Any = request.customized_info[MARK]
    assert marks[3:5] == [True, True]
    assert marks[5:5] == [True]


def test_the_front_end_takes_the_marks_out_of_an_output() -> None:
    output = SimpleNamespace(customized_info={MARK: [[None], [True], None], "theirs": [[1], [2], [3]]})
    assert take_marks(output) == [1]
    assert output.customized_info == {"theirs": [[1], [2], [3]]}
    assert take_marks(output) == []
    alone = SimpleNamespace(customized_info={MARK: [[True]]})
    assert take_marks(alone) == [0]
    assert alone.customized_info is None
    assert take_marks(SimpleNamespace()) == []


def test_a_request_stays_marked_when_it_goes_on_elsewhere() -> None:
    server = Server()
    server.view(1, r0=0, r1=0)
    server.accept("a")
    server.accept("b")
    server.deliver("a", [1], "a", 1, customized_info={MARK: [[True]]})
    server.front_end.on_gone(0, 0)
    server.deliver("a~1", [2], "ab", 2, finished=True)
    server.deliver("b", [2], "b", 1, finished=True)
    answers: list[dict[str, Any]] = [{"meta_info": {"id": "a"}}, {"meta_info": {"id": "b"}}]
    server.front_end.masked.mark(answers)
    assert [answer["meta_info"].get(MARK) for answer in answers] == [True, None]


def test_what_a_client_gets_is_marked_and_a_client_that_goes_away_ends_the_answer() -> None:
    ended = []

    async def answers() -> AsyncIterator[dict[str, Any]]:
        try:
            for _ in range(3):
                yield {"meta_info": {"id": "a"}}
        finally:
            ended.append(True)

    async def body() -> None:
        masked = MaskedRequests(MetricsWriter("test"))
        masked.add("a")
        marking = masked.marking(answers())
        assert (await anext(marking))["meta_info"] == {"id": "a", MARK: True}
        await marking.aclose()  # type: ignore[attr-defined]
        assert ended

    asyncio.run(body())


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_requests, "_MOST", 2)
    masked = MaskedRequests(MetricsWriter("test"))
    for request_id in "abc":
        masked.add(request_id)
    answers: list[dict[str, Any]] = [{"meta_info": {"id": each}} for each in "abc"]
    masked.mark(answers)
    assert [answer["meta_info"].get(mask_mark.MARK) for answer in answers] == [None, True, True]
