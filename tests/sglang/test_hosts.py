"""The real server on two hosts: their ranks are one instance, and each host serves on when the other is lost.

The tests share the servers, and each leaves all ranks in.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.common import host_servers
from bench.common.host_servers import RANKS_EACH, HostServers
from eep.control.supervisor.stopped_watch import time_of_stopped
from eep.drill.load import Load
from eep.drill.story import Story
from eep.operations.host_status import read_status
from tests.sglang.drills import Drilled, lives_of, wait_for, wait_for_answers

_reason = host_servers.why_not()
pytestmark = [pytest.mark.timeout(1200), pytest.mark.skipif(_reason is not None, reason=str(_reason))]
ALL = 2 * RANKS_EACH
LONGEST = 600
"""Tokens of a prompt."""
_WENT_ON = "a request went on to"
"""What the log of a front end says of each request that another one answers."""


@pytest.fixture(scope="module")
def hosts(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServers]:
    with host_servers.running(model, tmp_path_factory.mktemp("hosts"), arguments=("--eep-faults", "on")) as servers:
        yield servers


@pytest.fixture(scope="module")
def answers(hosts: HostServers) -> Drilled:
    """What host 0 answers while nothing is wrong."""
    return Drilled.of(hosts.servers[0], ranks=ALL, longest=LONGEST)


def at(hosts: HostServers, host: int, answers: Drilled) -> Drilled:
    """The same questions to another host."""
    return Drilled(hosts.servers[host], ALL, answers.prompts, answers.wanted)


def check_answers(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        wait_for_answers(story.load, len(drilled.prompts))
    drilled.check(story)


def is_stopped(story: Story, rank: int) -> bool:
    """Whether the process of the rank stands still."""
    pid = story.target.ranks()[rank].pid
    return pid is not None and time_of_stopped(pid) is not None


def test_each_host_says_which_hosts_could_go(hosts: HostServers, answers: Drilled) -> None:
    for number, server in enumerate(hosts.servers):
        assert server.directory is not None
        told = read_status(server.directory)
        assert {rank["host"] for rank in told["ranks"].values()} == {f"node-{number}"}
        assert told["other_hosts"].keys() == {f"node-{1 - number}"}
        assert told["margin"]["hosts"] == (["node-0", "node-1"] if told["margin"]["any_hosts"] else [])


def test_both_hosts_answer_alike(hosts: HostServers, answers: Drilled) -> None:
    for host in range(2):
        check_answers(at(hosts, host, answers))


def test_a_rank_of_another_host_is_lost_and_comes_back(hosts: HostServers, answers: Drilled) -> None:
    near, far = at(hosts, 0, answers), at(hosts, 1, answers)
    here, there = near.story(clients=12), far.story()
    with here.load, there.load:
        wait_for_answers(here.load, 3)
        lives = lives_of(there, RANKS_EACH)
        there.kill(RANKS_EACH)
        assert there.wait_until_back(ALL, lives), hosts.log(1)[-3000:]
        wait_for_answers(here.load, 3)
        wait_for_answers(there.load, 3)
    near.check(here)
    far.check(there)


@pytest.mark.long
def test_another_host_answers_for_one_without_ranks(hosts: HostServers, answers: Drilled) -> None:
    """What was under way waits for the ranks of its host. What comes meanwhile goes on to the other one."""
    drilled, own = at(hosts, 1, answers), range(RANKS_EACH, ALL)
    story = drilled.story()
    with story.load:
        wait_for_answers(story.load, 3)
        lives = lives_of(story, *own)
        for rank in own:
            story.target.arm(rank, "join.loaded", "stop")
        for rank in own:
            story.kill(rank)
        assert story.wait_until_run(range(RANKS_EACH)), hosts.log(1)[-3000:]
        with Load(hosts.servers[1].url, answers.prompts, answers.wanted, clients=4) as passed_on:
            wait_for_answers(passed_on, len(answers.prompts))
        assert [answer.problem for answer in passed_on.failed] == []
        assert [(answer.prompt, answer.tokens) for answer in passed_on.wrong] == []
        assert hosts.log(1).count(_WENT_ON) >= len(passed_on.answers)
        for rank in own:
            assert story.target.wait_until_fired(rank, "join.loaded", 120.0), hosts.log(1)[-3000:]
            wait_for(partial(is_stopped, story, rank), f"rank {rank} stopped")
            story.target.resume(rank)
        assert story.wait_until_back(ALL, lives), hosts.log(1)[-3000:]
    drilled.check(story)
    before = hosts.log(1).count(_WENT_ON)
    check_answers(drilled)
    assert hosts.log(1).count(_WENT_ON) == before, "a host with ranks sent requests away"


@pytest.mark.parametrize(
    "lost", [pytest.param(1, marks=pytest.mark.long, id="the last host"), pytest.param(0, id="the first host")]
)
def test_a_host_is_lost_and_returns(hosts: HostServers, answers: Drilled, lost: int) -> None:
    kept = at(hosts, 1 - lost, answers)
    story = kept.story()
    with story.load:
        wait_for_answers(story.load, 3)
        hosts.servers[lost].kill()
        assert story.wait_until_run(range((1 - lost) * RANKS_EACH, (2 - lost) * RANKS_EACH)), hosts.log(1 - lost)[
            -3000:
        ]
        wait_for_answers(story.load, 5)
        hosts.start_again(lost)
        assert story.wait_until_all_run(ALL), hosts.log(1 - lost)[-3000:]
    kept.check(story)
    check_answers(at(hosts, lost, answers))
