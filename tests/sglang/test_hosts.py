"""The real server on two hosts: their ranks are one instance, and each host serves on when the other is lost.

The tests share the servers, and each leaves all ranks in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from bench.common import host_servers
from bench.common.host_servers import RANKS_EACH, HostServers
from eep import cli
from eep.drill.load import Load
from eep.drill.story import Story
from eep.operations.host_status import read_status
from tests.sglang.drills import Drilled, lives_of, wait_for, wait_for_answers
from tests.sglang.retrying_load import RetryingLoad

_reason = host_servers.why_not()
pytestmark = [pytest.mark.timeout(1200), pytest.mark.skipif(_reason is not None, reason=str(_reason))]
ALL = 2 * RANKS_EACH
LONGEST = 600
"""Tokens of a prompt."""
_WENT_ON = "a request went on to"
"""What the log of a front end says of each request that another one answers."""
_STAYS_AWAY_S = 45
_TELLS_TO_RETRY = re.compile(r"HTTP (Error )?503|Connection|Disconnected|refused|reset")
"""What a client has of a server that drains, ends or is away: a status, or no connection."""


@pytest.fixture(scope="module")
def hosts(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServers]:
    with host_servers.running(model, tmp_path_factory.mktemp("hosts"), arguments=("--eep-faults", "on")) as servers:
        yield servers


@pytest.fixture(scope="module")
def answers(hosts: HostServers) -> Drilled:
    """What host 0 answers while nothing is wrong."""
    return Drilled.of(hosts.servers[0], ranks=ALL, prompts=6, longest=LONGEST)


def at(hosts: HostServers, host: int, answers: Drilled) -> Drilled:
    """The same questions to another host."""
    return Drilled(hosts.servers[host], ALL, answers.prompts, answers.wanted)


def check_answers(drilled: Drilled) -> None:
    story = drilled.story()
    with story.load:
        wait_for_answers(story.load, len(drilled.prompts))
    drilled.check(story)


def test_each_host_says_which_hosts_could_go(hosts: HostServers, answers: Drilled) -> None:
    for number, server in enumerate(hosts.servers):
        assert server.directory is not None
        told = read_status(server.directory)
        assert {rank["host"] for rank in told["ranks"].values()} == {f"node-{number}"}
        assert told["other_hosts"].keys() == {f"node-{1 - number}"}
        assert told["margin"]["hosts"] == (["node-0", "node-1"] if told["margin"]["any_hosts"] else [])


def test_the_other_host_answers_alike(hosts: HostServers, answers: Drilled) -> None:
    check_answers(at(hosts, 1, answers))


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
        for rank in own:  # longer than the answers take, and shorter than a rank may make no progress while it starts
            story.target.arm(rank, "join.loaded", "sleep", sleep_ms=_STAYS_AWAY_S * 1000)
        for rank in own:
            story.kill(rank)
        assert story.wait_until_run(range(RANKS_EACH)), hosts.log(1)[-3000:]
        with Load(hosts.servers[1].url, answers.prompts, answers.wanted, clients=4) as passed_on:
            wait_for_answers(passed_on, 4)
        assert [answer.problem for answer in passed_on.failed] == []
        assert [(answer.prompt, answer.tokens) for answer in passed_on.wrong] == []
        assert hosts.log(1).count(_WENT_ON) >= 4
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


def drain(hosts: HostServers, host: int) -> None:
    """As its operator does. Returns when none of its requests is open."""
    assert cli.main(["drain", "--dir", str(hosts.servers[host].directory)]) == 0, hosts.log(host)[-3000:]


@pytest.mark.long
def test_a_host_is_drained_and_taken_out_and_returns(hosts: HostServers, answers: Drilled) -> None:
    """Clients of the other host see none of it. What the host has accepted it answers, and it refuses the rest by status."""
    kept, gone = at(hosts, 0, answers), at(hosts, 1, answers)
    story, load = kept.story(), RetryingLoad(lambda: [hosts.servers[1].url], gone.prompts, gone.wanted, clients=6)
    with story.load:
        load.start()
        wait_for_answers(load, 6)
        drain(hosts, 1)
        wait_for(lambda: len(load.retries) >= 6, "clients of the drained host being refused")
        hosts.servers[1].stop()
        assert story.wait_until_run(range(RANKS_EACH)), hosts.log(0)[-3000:]
        wait_for_answers(story.load, 5)
        hosts.start_again(1)
        assert story.wait_until_all_run(ALL), hosts.log(0)[-3000:]
        wait_for_answers(load, 6)
        load.stop()
    untold = {each.problem for each in load.retries if _TELLS_TO_RETRY.search(each.problem) is None}
    assert untold == set(), "a router would not try these again"
    assert [each.tokens for each in load.retries if each.tokens] == [], "a request that was accepted was not answered"
    assert [answer.problem for answer in load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in load.wrong] == []
    kept.check(story)


@pytest.mark.long
def test_clients_that_try_again_see_no_host_go(hosts: HostServers, answers: Drilled) -> None:
    """One is drained, told to end and started again, and then the first host of all is lost at once."""
    load = RetryingLoad(lambda: [server.url for server in hosts.servers], answers.prompts, answers.wanted)
    story = at(hosts, 0, answers).story()
    with load:
        wait_for_answers(load, 6)
        drain(hosts, 1)
        hosts.servers[1].stop()
        wait_for_answers(load, 6)
        hosts.start_again(1)
        assert story.wait_until_all_run(ALL), hosts.log(0)[-3000:]
        story.close()
        wait_for_answers(load, 6)
        hosts.servers[0].kill()
        wait_for_answers(load, 6)
        hosts.start_again(0)
        story = at(hosts, 1, answers).story()
        assert story.wait_until_all_run(ALL), hosts.log(1)[-3000:]
        story.close()
        wait_for_answers(load, 6)
    assert load.retries, "no request was under way when a host went"
    assert [answer.problem for answer in load.failed] == []
    assert [(answer.prompt, answer.tokens) for answer in load.wrong + load.misled] == []


@pytest.mark.long
@pytest.mark.parametrize("ways", [((0, 1), (1, 0)), ((1, 0),)], ids=["both ways", "one way"])
def test_hosts_that_lose_each_other_while_one_drains(
    hosts: HostServers, answers: Drilled, ways: tuple[tuple[int, int], ...]
) -> None:
    """Both reach the store. One side goes, and does not come back before the link does: it could not settle with the other.
    So the other serves on, and what waits on the side that went is answered when the link is back."""
    stories = [at(hosts, host, answers).story() for host in range(2)]
    draining = Thread(target=drain, args=(hosts, 1))
    with stories[0].load, stories[1].load:
        for story in stories:
            wait_for_answers(story.load, 3)
        draining.start()
        for source, target in ways:
            hosts.network.cut(source, target)
        sides = [range(host * RANKS_EACH, (host + 1) * RANKS_EACH) for host in range(2)]
        wait_for(lambda: any(has_view_of(stories[0], side) for side in sides), "one side going")
        side = next(number for number in range(2) if has_view_of(stories[0], sides[number]))
        other = hosts.servers[1 - side].directory
        assert other is not None
        wait_for(lambda: all(rank["status"] == "ready" for rank in read_status(other)["ranks"].values()), "new lives")
        assert read_status(other)["missing_links"] == [f"node-{side}"]
        if side == 0:  # the other one drains
            wait_for_answers(stories[0].load, 6)
        assert has_view_of(stories[0], sides[side]), "a rank joined that cannot reach the others"
        hosts.network.heal()
        draining.join(300.0)
        assert not draining.is_alive()
        stories[1].load.stop()
    assert cli.main(["undrain", "--dir", str(hosts.servers[1].directory)]) == 0
    refused = [answer for answer in stories[1].load.failed if not answer.tokens]
    stories[1].load.answers = [answer for answer in stories[1].load.answers if answer not in refused]
    assert all("503" in answer.problem for answer in refused), {answer.problem for answer in refused}
    for host, story in enumerate(stories):
        at(hosts, host, answers).check(story)


def has_view_of(story: Story, ranks: Iterable[int]) -> bool:
    """Whether just these are in and run."""
    _, view, runs = story.views[-1]
    return runs and view.active == tuple(ranks)
