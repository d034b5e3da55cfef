"""Ranks of the real server that get no further: all at once, which no peer can notice, and one that is stuck by itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from eep.drill.load import Load, ask
from eep.drill.sglang_server import Server
from eep.drill.story import Story
from eep.observe.event_log import read_events
from tests.sglang.drills import lives_of, wait_for_answers

pytestmark = pytest.mark.timeout(900)

RANKS = 4
CLIENTS, TOKENS, BEGUN = 4, 150, 5


def test_ranks_that_are_all_stopped_come_back_and_every_answer_is_right(plain: Server) -> None:
    assert plain.directory is not None
    prompts = [list(f"Stand still {number}".encode()) for number in range(6)]
    story = Story(plain.directory, Load.with_reference(plain.url, prompts, clients=4))
    with story.load:
        wait_for_answers(story.load)
        lives = lives_of(story, *range(RANKS))
        for rank in range(RANKS):
            story.stop(rank)
        assert story.wait_until_back(RANKS, lives), plain.log[-3000:]
        wait_for_answers(story.load)
    story.close()
    assert [answer.problem for answer in story.load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in story.load.wrong] == []
    stalls = [event for event in read_events(plain.directory / "events.jsonl") if "made no progress" in event.cause]
    assert {(event.rank, event.incarnation) for event in stalls} >= set(lives.items())


@pytest.mark.parametrize(("how", "said"), [("sleep", "it hangs"), ("spin", "it computes without end")])
def test_a_rank_that_is_stuck_between_two_steps_is_replaced_and_every_answer_is_right(
    plain: Server, how: str, said: str
) -> None:
    """Its process lives, and is not stopped. Its peers would wait for ten seconds before they suspect it. It gets stuck while
    all answers go on and none begins: beside a prefill it might honestly compute for long."""
    assert plain.directory is not None
    prompts = [list(f"{how} {number}".encode()) for number in range(CLIENTS)]
    story = Story(plain.directory, Load.with_reference(plain.url, prompts, tokens=TOKENS, clients=CLIENTS))
    lives, come, begun = lives_of(story, 2), dict.fromkeys(range(CLIENTS), 0), threading.Lock()

    def see(client: int, tokens: int) -> None:
        come[client] = tokens
        if min(come.values()) >= BEGUN and begun.acquire(blocking=False):
            assert max(come.values()) < TOKENS, "an answer has ended before the last had begun"
            story.target.arm(2, "step.trusted", how, sleep_ms=300_000)

    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [
            clients.submit(ask, plain.url, prompt, TOKENS, number=client, seen=partial(see, client))
            for client, prompt in enumerate(prompts)
        ]
        answers = [each.result() for each in asked]
    assert story.wait_until_back(RANKS, lives), plain.log[-3000:]
    story.close()
    assert [answer.problem for answer in answers] == [""] * CLIENTS
    assert [answer.tokens for answer in answers] == [list(wanted) for wanted in story.load.wanted]
    lines = read_events(plain.directory / "events.jsonl")
    assert any((line.rank, line.incarnation) == (2, lives[2]) and line.cause.endswith(said) for line in lines)
