"""On a GPU: ranks are killed while they note contexts, copy them to host memory, and restore them. Every token is right."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.context.clients import flush
from bench.context.restore_switch import Switch
from eep.drill.devices import CUDA
from eep.drill.load import Load
from eep.drill.sglang_server import FOUR_RANKS, Server
from eep.drill.story import Story
from eep.drill.token_certainty import clear_prompts
from tests.gpu.sglang.conftest import A_SPARE_EACH, serving
from tests.sglang.drills import wait_for_answers

pytestmark = pytest.mark.timeout(900)
RANKS, TOKENS = 4, 96
LENGTHS = (40, 300, 700, 1300, 2000, 3100)
FLAGS = ("--eep-kv-backup", "2GiB", "--max-total-tokens", "65536", "--eep-faults", "on")


@dataclass
class Copying:
    server: Server
    switch: Switch
    load: Load
    """Never started: its prompts and answers."""

    def story(self) -> Story:
        assert self.server.directory is not None
        return Story(self.server.directory, Load(self.server.url, self.load.prompts, self.load.wanted, clients=16))

    def taken(self, source: str) -> int:
        return len(re.findall(rf"has \d+ of \d+ tokens from {source}", self.server.log))


@pytest.fixture(scope="module")
def copying(model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copying]:
    place = tmp_path_factory.mktemp("copying")
    switch = Switch(place / "switch")
    switch.set(restored=True, caches=True)
    environment = {**mps, **switch.environment()}
    with serving(model, place, environment, *FOUR_RANKS, *A_SPARE_EACH, *FLAGS, device=CUDA.caching()) as server:
        choose = random.Random(6)
        prompts = [[choose.randrange(3, 250) for _ in range(length)] for length in LENGTHS for _ in range(5)]
        clear = clear_prompts(server.url, prompts, 16, TOKENS)
        yield Copying(server, switch, Load.with_reference(server.url, clear, tokens=TOKENS, clients=16))


def check(story: Story, server: Server) -> None:
    story.close()
    assert [answer.problem for answer in story.load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in story.load.wrong] == [], server.log[-3000:]
    assert story.target.armed() == []


@pytest.mark.parametrize("point", ["kv.journal", "kv.backup.mid"])
def test_a_rank_is_killed_while_it_notes_or_copies(copying: Copying, point: str) -> None:
    story = copying.story()
    with story.load:
        wait_for_answers(story.load, 16)
        life = story.target.ranks()[2].incarnation
        story.target.arm(2, point, "kill")
        assert story.target.wait_until_fired(2, point, 60.0), f"never passed: {point}"
        assert story.wait_until_back(RANKS, {2: life}), copying.server.log[-3000:]
        wait_for_answers(story.load, 16)
    check(story, copying.server)


@pytest.mark.parametrize("point", ["kv.restore.before", "kv.restore.mid", "kv.restore.after"])
def test_a_rank_is_killed_while_it_restores(copying: Copying, point: str) -> None:
    """Which rank takes a request over is the router's to choose, so others are killed until this one does."""
    story = copying.story()
    with story.load:
        story.target.arm(0, point, "kill")
        for lost in (1, 2, 3, 1, 2, 3):
            wait_for_answers(story.load, 16)
            lives = {rank: story.target.ranks()[rank].incarnation for rank in (0, lost)}
            story.kill(lost)
            fired = story.target.wait_until_fired(0, point, 5.0)
            returning = lives if fired else {lost: lives[lost]}
            assert story.wait_until_back(RANKS, returning), copying.server.log[-3000:]
            if fired:
                break
        else:
            pytest.fail(f"never passed: {point}")
        wait_for_answers(story.load, 16)
    check(story, copying.server)


def test_contexts_come_from_host_memory_when_the_caches_are_gone(copying: Copying) -> None:
    copying.switch.set(restored=True, caches=False)
    before = copying.taken("the host copy of rank")
    for rank in (3, 1):
        flush(copying.server.url)  # or those that take requests over have had the same prompts
        story = copying.story()
        with story.load:
            wait_for_answers(story.load, 4)
            life = story.target.ranks()[rank].incarnation
            story.kill(rank)
            assert story.wait_until_back(RANKS, {rank: life}), copying.server.log[-3000:]
            wait_for_answers(story.load, 16)
        check(story, copying.server)
    copying.switch.set(restored=True, caches=True)
    assert copying.taken("the host copy of rank") > before
