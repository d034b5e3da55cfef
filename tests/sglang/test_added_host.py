"""The real server on two hosts gets a third one, without either being started again. Then the first is lost and returns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.common import host_servers
from bench.common.host_servers import RANKS_EACH, HostServers
from tests.sglang.drills import Drilled, wait_for_answers

_reason = host_servers.why_not()
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
]
TWO, THREE = 2 * RANKS_EACH, 3 * RANKS_EACH


@pytest.fixture(scope="module")
def hosts(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServers]:
    with host_servers.running(model, tmp_path_factory.mktemp("hosts"), later=1) as servers:
        yield servers


def test_a_host_is_added_and_the_first_is_lost_and_returns(hosts: HostServers) -> None:
    """Clients of the hosts that stay see all their answers, those of one instance of two hosts."""
    first = Drilled.of(hosts.servers[0], ranks=TWO, prompts=6, longest=600)
    second = Drilled(hosts.servers[1], THREE, first.prompts, first.wanted)
    story = second.story()
    with story.load:
        wait_for_answers(story.load, 3)
        added = hosts.add()
        assert story.wait_until_all_run(THREE), hosts.log(added)[-3000:]
        third = Drilled(hosts.servers[added], THREE, first.prompts, first.wanted)
        alongside = third.story()
        with alongside.load:
            wait_for_answers(alongside.load, 6)
            hosts.servers[0].kill()
            assert story.wait_until_run(range(RANKS_EACH, THREE)), hosts.log(1)[-3000:]
            wait_for_answers(story.load, 3)
            wait_for_answers(alongside.load, 3)
            hosts.start_again(0)
            assert story.wait_until_all_run(THREE), hosts.log(0)[-3000:]
            wait_for_answers(alongside.load, 3)
        third.check(alongside)
    second.check(story)
    again = Drilled(hosts.servers[0], THREE, first.prompts, first.wanted)
    last = again.story()
    with last.load:
        wait_for_answers(last.load, len(first.prompts))
    again.check(last)
