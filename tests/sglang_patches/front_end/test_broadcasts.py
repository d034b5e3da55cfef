"""Questions that every rank is asked, and orders to all ranks that are refused. Of SGLang one file is loaded."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eep.view import View
from sglang_patches.front_end import broadcasts, tokenizer_hooks
from sglang_patches.front_end.replay import FrontEnd


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has one question, made for four ranks, and a front end. Only SGLang's class of questions is loaded, from its file."""
    name = "sglang.srt.managers.communicator"
    package = importlib.util.find_spec("sglang")
    if package is None:
        pytest.skip("SGLang is not installed")
    file = Path(next(iter(package.submodule_search_locations or ()))) / "srt" / "managers" / "communicator.py"
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    manager = SimpleNamespace(ask=module.FanOutCommunicator(lambda question: None, 4))
    manager.front_end = FrontEnd(
        lambda message: None,
        lambda *_: None,
        lambda wire: None,
        lost_lives=partial(broadcasts.expect_answers, manager),
    )
    return manager


async def answers_of(manager: Any, *happenings: Any) -> list[str]:
    """The answers that the caller gets. A happening is an answer (a text), a new view, or the number of a lost rank."""
    asked = asyncio.create_task(manager.ask("how are you?"))
    for each in happenings:
        await asyncio.sleep(0)
        happens(manager, each)
    answers: list[str] = await asyncio.wait_for(asked, 5)
    return answers


def happens(manager: Any, happening: Any) -> None:
    if isinstance(happening, str):
        manager.ask.handle_recv(happening)
    elif isinstance(happening, View):
        tokenizer_hooks._apply_view(manager, manager.front_end, happening, True)
    else:
        manager.front_end.on_gone(happening, 0)


TWO_OF_FOUR = View(1, (0, 1), (0, 0, -1, -1))
THREE_OF_FOUR = View(1, (0, 1, 2), (0, 0, 0, -1))
WITHOUT_THE_THIRD = View(2, (0, 1), (0, 0, -1, -1))


@pytest.mark.parametrize("happenings", [("a", "b", WITHOUT_THE_THIRD), ("a", WITHOUT_THE_THIRD, "b")])
def test_what_is_asked_between_a_loss_and_its_view_is_answered_by_those_that_are_left(
    manager: Any, happenings: tuple[Any, ...]
) -> None:
    happens(manager, THREE_OF_FOUR)
    happens(manager, 2)
    assert asyncio.run(answers_of(manager, *happenings)) == ["a", "b"]
    assert asyncio.run(answers_of(manager, "c", "d")) == ["c", "d"]


def test_what_was_asked_before_a_loss_is_answered_by_those_that_are_left(manager: Any) -> None:
    happens(manager, THREE_OF_FOUR)
    assert asyncio.run(answers_of(manager, "a", 2, WITHOUT_THE_THIRD, "b")) == ["a", "b"]


@pytest.mark.parametrize("happenings", [("a", "b", TWO_OF_FOUR), (TWO_OF_FOUR, "a", "b")])
def test_what_is_asked_before_the_first_view_is_answered_by_the_ranks_of_the_start(
    manager: Any, happenings: tuple[Any, ...]
) -> None:
    assert asyncio.run(answers_of(manager, *happenings)) == ["a", "b"]


def test_a_rank_that_comes_does_not_answer_what_was_asked_before(manager: Any) -> None:
    happens(manager, TWO_OF_FOUR)
    assert asyncio.run(answers_of(manager, "a", View(2, (0, 1, 2), (0, 0, 0, -1)), "b")) == ["a", "b"]
    assert asyncio.run(answers_of(manager, "a", "b", "c")) == ["a", "b", "c"]


def test_a_question_is_refused_while_no_rank_is_in(manager: Any) -> None:
    fastapi = pytest.importorskip("fastapi")
    happens(manager, TWO_OF_FOUR)
    happens(manager, 0)
    happens(manager, 1)

    async def asks() -> Any:
        return await asyncio.wait_for(
            broadcasts.ask_all_ranks(type(manager.ask).__call__, manager.ask, "how are you?"), 5
        )

    with pytest.raises(fastapi.HTTPException, match="no rank is in") as refused:
        asyncio.run(asks())
    assert refused.value.status_code == 503
    happens(manager, View(2, (0, 1), (1, 1, -1, -1)))
    assert asyncio.run(answers_of(manager, "a", "b")) == ["a", "b"]


def test_what_stood_in_line_when_the_last_rank_went_ends_with_the_next_view(manager: Any) -> None:
    async def body() -> None:
        happens(manager, TWO_OF_FOUR)
        first, second = (asyncio.create_task(manager.ask("how are you?")) for _ in range(2))
        await asyncio.sleep(0)
        happens(manager, 0)
        happens(manager, 1)
        assert await asyncio.wait_for(first, 5) == []
        await asyncio.sleep(0)
        happens(manager, View(2, (0, 1), (1, 1, -1, -1)))
        assert await asyncio.wait_for(second, 5) == []

    asyncio.run(body())


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_ranks_are_not_paused(mode: str) -> None:
    fastapi = pytest.importorskip("fastapi")

    async def pause(manager: Any, obj: Any) -> None:
        raise AssertionError("SGLang was asked to pause")

    with pytest.raises(fastapi.HTTPException, match=r"for lost.*'abort'") as refused:
        asyncio.run(broadcasts.refuse_to_pause(pause, object(), SimpleNamespace(mode=mode)))
    assert refused.value.status_code == 400
    assert mode in refused.value.detail


def test_what_ranks_hold_is_not_changed() -> None:
    fastapi = pytest.importorskip("fastapi")
    with pytest.raises(fastapi.HTTPException, match="Start another server") as refused:
        asyncio.run(broadcasts.refuse_to_change(object(), object(), request=None))
    assert refused.value.status_code == 400


def test_requests_can_be_ended_and_held_back() -> None:
    asked: list[Any] = []

    async def pause(manager: Any, obj: Any) -> None:
        asked.append((manager, obj))

    order = (object(), SimpleNamespace(mode="abort"))
    asyncio.run(broadcasts.refuse_to_pause(pause, *order))
    assert asked == [order]
