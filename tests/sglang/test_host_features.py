"""What a server on two hosts can do beyond the loss of ranks and hosts: spares, shadow copies, contexts in host memory, and
ranks for experts only."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.common import host_servers
from bench.common.host_servers import RANKS_EACH, HostServers
from eep import cli
from eep.drill.faults import Target
from eep.operations.host_status import read_status
from tests.sglang.drills import Drilled, lives_of, wait_for, wait_for_answers

_reason = host_servers.why_not()
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
]
ALL = 2 * RANKS_EACH
SPARE_BEGINS = "a spare begins as incarnation"
WEIGHTS_STAY = "this life takes over the weights of"
FLAGS = ("--eep-spares", str(RANKS_EACH), "--eep-shadow-copies", "on", "--eep-kv-backup", "64MiB")


@pytest.fixture(scope="module")
def hosts(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServers]:
    with host_servers.running(model, tmp_path_factory.mktemp("hosts"), arguments=FLAGS) as servers:
        yield servers


@pytest.fixture(scope="module")
def both(hosts: HostServers) -> tuple[Drilled, Drilled]:
    """What each host is asked, and what it answers while nothing is wrong."""
    near = Drilled.of(hosts.servers[0], ranks=ALL, prompts=6, longest=200)
    return near, Drilled(hosts.servers[1], ALL, near.prompts, near.wanted)


def directory_of(hosts: HostServers, host: int) -> Path:
    directory = hosts.servers[host].directory
    assert directory is not None
    return directory


def test_lost_ranks_of_each_host_come_back_as_spares(hosts: HostServers, both: tuple[Drilled, Drilled]) -> None:
    stories = [drilled.story() for drilled in both]
    with stories[0].load, stories[1].load:
        for host, rank in ((1, ALL - 1), (0, 0), (1, ALL - 1)):
            story, target = stories[host], Target(directory_of(hosts, host))
            waiting = set(target.wait_for_spares(RANKS_EACH))
            assert len(waiting) == RANKS_EACH
            for each in stories:
                wait_for_answers(each.load, 3)
            lives, before = lives_of(story, rank), hosts.log(host).count(SPARE_BEGINS)
            story.kill(rank)
            assert story.wait_until_back(ALL, lives), hosts.log(host)[-3000:]
            assert target.ranks()[rank].pid in waiting
            assert hosts.log(host).count(SPARE_BEGINS) == before + 1
            assert WEIGHTS_STAY in hosts.log(host)
            for each in stories:
                wait_for_answers(each.load, 3)
    for drilled, story in zip(both, stories, strict=True):
        drilled.check(story)


def test_each_host_copies_the_contexts_of_its_requests(hosts: HostServers, both: tuple[Drilled, Drilled]) -> None:
    for host, drilled in enumerate(both):
        place, story = directory_of(hosts, host), drilled.story()
        with story.load:
            wait_for(lambda at=place: read_status(at)["context_copies"]["covered_tokens"] > 0, "a context being copied")
        drilled.check(story)


def test_a_host_with_spares_is_lost_and_returns(hosts: HostServers, both: tuple[Drilled, Drilled]) -> None:
    story = both[0].story()
    with story.load:
        wait_for_answers(story.load, 3)
        hosts.servers[1].kill()
        assert story.wait_until_run(range(RANKS_EACH)), hosts.log(0)[-3000:]
        wait_for_answers(story.load, 3)
        hosts.start_again(1)
        assert story.wait_until_all_run(ALL), hosts.log(0)[-3000:]
        wait_for_answers(story.load, 3)
    both[0].check(story)


def test_a_rank_serves_experts_only_for_all_hosts(hosts: HostServers, both: tuple[Drilled, Drilled]) -> None:
    shy = ALL - 1
    far = Drilled(hosts.servers[1], ALL, both[0].prompts, both[0].wanted)
    stories = [both[0].story(), far.story()]

    def told() -> dict[str, Any]:
        with urllib.request.urlopen(f"{hosts.servers[1].url}/eep/status", timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)["ranks"][str(shy)]
        return found

    def set_role(role: str) -> None:
        assert cli.main(["rank", "role", str(shy), role, "--dir", str(directory_of(hosts, 1))]) == 0, hosts.log(1)[
            -3000:
        ]

    with stories[0].load, stories[1].load:
        for story in stories:
            wait_for_answers(story.load, 3)
        set_role("experts")
        wait_for(lambda: told()["requests"] == 0, "the rank to have no request")
        for story in stories:
            wait_for_answers(story.load, 6)
        assert (told()["in"], told()["role"], told()["requests"]) == (True, "experts", 0)
        assert told()["experts"] > 0
        lives = lives_of(stories[0], 0)
        stories[0].kill(0)
        assert stories[0].wait_until_back(ALL, lives), hosts.log(0)[-3000:]
        for story in stories:
            wait_for_answers(story.load, 3)
        set_role("both")
        wait_for(lambda: told()["requests"] > 0, "the rank to serve requests")
        for story in stories:
            wait_for_answers(story.load, 6)
    for drilled, story in zip((both[0], far), stories, strict=True):
        drilled.check(story)
