"""The real server without a prefix cache: a request that moves takes its context along all the same."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.drill.load import Load, ask
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from tests.sglang.drills import wait_for_answers

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

RANKS, TOKENS = 4, 16
LONG_ANSWER = 100
"""Most of the time of such a request goes into its answer: that is where a kill finds it."""
PART, PARTS = 64, 3


@pytest.fixture(scope="module")
def server(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("own-prefix")
    in_parts = ("--chunked-prefill-size", str(RANKS * PART))  # SGLang divides it among the ranks
    arguments = (*FOUR_RANKS, *in_parts, "--eep-timeout-ms", "10000", "--eep-faults", "on")
    with Server(model, arguments, place / "log", directory=place / "d") as made:
        yield made
    assert made.leftovers() == []


def taken_along(server: Server) -> list[tuple[int, int]]:
    """How many tokens requests had from a lost rank, and how many they needed."""
    return [(int(had), int(all_)) for had, all_ in re.findall(r"has (\d+) of (\d+) tokens from rank", server.log)]


def test_a_request_that_moves_takes_its_context_along(server: Server) -> None:
    assert server.directory is not None
    choose = random.Random(7)
    prompts = [[choose.randrange(256) for _ in range(length)] for length in (90, 130, 210, 300)]
    load = Load.with_reference(server.url, prompts, tokens=LONG_ANSWER, ranks=RANKS)
    story = Story(server.directory, load)
    with load:
        for rank in (2, 1):
            wait_for_answers(load)
            # Just after an answer the next request has only begun: its rank dies some steps later.
            story.target.arm(rank, "kv.journal", "kill", skip=LONG_ANSWER // 2)
            assert story.target.wait_until_fired(rank, "kv.journal", 120.0)
            assert story.wait_until_all_run(RANKS), server.log[-3000:]
        wait_for_answers(load)
    story.close()
    assert [answer.problem for answer in load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in load.wrong] == []
    assert taken_along(server), "every context was computed again"
    assert all(had <= needed - 1 for had, needed in taken_along(server))


def test_a_prompt_that_moves_takes_its_computed_parts_along(server: Server) -> None:
    assert server.directory is not None
    choose = random.Random(11)
    prompt = [choose.randrange(256) for _ in range(2 * PARTS * PART)]
    wanted = ask(server.url, prompt, TOKENS, ignore_eos=False)
    assert wanted.problem == ""
    story = Story(server.directory, Load(server.url, [], []))
    assert story.wait_until_all_run(RANKS)
    story.target.arm(2, "kv.journal", "kill", skip=PARTS)
    answer = ask(server.url, prompt, TOKENS, rank=2, ignore_eos=False)
    assert story.target.wait_until_fired(2, "kv.journal", 1.0)
    assert (answer.problem, answer.tokens) == ("", wanted.tokens)
    assert (PARTS * PART, len(prompt)) in taken_along(server)
    assert story.wait_until_all_run(RANKS), server.log[-3000:]
    story.close()


@pytest.mark.parametrize("point", ["kv.restore.before", "kv.restore.mid", "kv.restore.after"])
def test_a_rank_is_killed_while_it_takes_a_request_over(server: Server, point: str) -> None:
    """Others are killed until rank 0 takes a request of theirs over."""
    assert server.directory is not None
    choose = random.Random(point)
    prompts = [[choose.randrange(256) for _ in range(length)] for length in (60, 90, 150, 200)]
    load = Load.with_reference(server.url, prompts, tokens=LONG_ANSWER, ranks=RANKS)
    story = Story(server.directory, load)
    assert story.wait_until_all_run(RANKS)
    with load:
        wait_for_answers(load)
        story.target.arm(0, point, "kill")
        for victim in (1, 2, 3, 1, 2, 3):
            story.kill(victim)
            if story.target.wait_until_fired(0, point, 20.0):
                break
            assert story.wait_until_all_run(RANKS), server.log[-3000:]
        else:
            pytest.fail(f"rank 0 never passed {point}")
        assert story.wait_until_all_run(RANKS), server.log[-3000:]
        wait_for_answers(load)
    story.close()
    assert [answer.problem for answer in load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in load.wrong] == []
