"""A rank serves experts only, and is killed while it becomes so. ``tests/sglang/test_roles.py`` has more."""

from __future__ import annotations

import json
import random
import urllib.request
from typing import Any

import pytest

from eep import cli
from eep.drill.load import Load
from eep.drill.sglang_server import Server
from eep.drill.story import Story
from tests.sglang.drills import wait_for, wait_for_answers
from tests.sglang.plain.test_failpoints import check_answers

pytestmark = pytest.mark.timeout(900)
RANKS, SHY = 4, 2


def test_a_rank_is_killed_while_it_gives_up_requests_and_has_them_again_later(plain: Server) -> None:
    def rank() -> dict[str, Any]:
        with urllib.request.urlopen(f"{plain.url}/eep/status", timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)["ranks"][str(SHY)]
        return found

    def set_role(role: str) -> int:
        return cli.main(["rank", "role", str(SHY), role, "--dir", str(plain.directory)])

    assert plain.directory is not None
    choose = random.Random(4)
    prompts = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(6)]
    wanted = [list(tokens) for tokens in Load.with_reference(plain.url, prompts).wanted]
    story = Story(plain.directory, Load(plain.url, prompts, wanted, clients=4))
    assert story.wait_until_all_run(RANKS), plain.log[-3000:]
    life = story.target.ranks()[SHY].incarnation
    with story.load:
        wait_for_answers(story.load)
        story.target.arm(SHY, "role.changed", "kill")
        assert set_role("experts") == 0
        assert story.target.wait_until_fired(SHY, "role.changed", 240.0)
        assert story.wait_until_back(RANKS, {SHY: life}), plain.log[-3000:]
        wait_for(lambda: rank()["room_bytes"] > 0, "its next life to give up its cache")
        wait_for_answers(story.load, 2)
        told = rank()
        assert (told["role"], told["requests"], told["kv_room"]) == ("experts", 0, 0)
        assert told["experts"] > 0
        assert set_role("both") == 0
        wait_for(lambda: rank()["requests"] > 0, "the rank to serve requests again")
    check_answers(story)
