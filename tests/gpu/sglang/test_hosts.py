"""The real server on two hosts whose ranks are on a GPU says what one rank of stock SGLang says there.

The hosts are addresses of the loopback network, with two ranks on each, libfabric's TCP between them, and decode steps in
graphs. Needs etcd in the path, and libfabric (``tests/gpu/test_hosts.py`` says how to bring its files).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.common import host_servers
from bench.common.host_servers import RANKS_EACH, LoopbackServers
from eep.drill.devices import CUDA
from eep.operations.host_status import read_status
from tests.data_plane.transport.requirements import why_no_links
from tests.gpu.sglang.conftest import Alone
from tests.sglang.drills import Drilled, wait_for_answers

_reason = host_servers.why_not_on_loopback() or why_no_links("cuda")
pytestmark = [pytest.mark.timeout(1500), pytest.mark.skipif(_reason is not None, reason=str(_reason))]
ALL = 2 * RANKS_EACH


@pytest.fixture(scope="module")
def hosts(model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServers]:
    with host_servers.running_on_loopback(model, tmp_path_factory.mktemp("hosts"), CUDA, mps) as servers:
        yield servers


def test_both_hosts_answer_as_one_rank_does(alone: Alone, hosts: LoopbackServers) -> None:
    """At the same time, with as many at once as a graph has room for."""
    both = [Drilled(server, ALL, alone.prompts, alone.wanted) for server in hosts.servers]
    stories = [each.story(clients=16) for each in both]
    with stories[0].load, stories[1].load:
        for story in stories:
            wait_for_answers(story.load, 3 * len(alone.prompts), within=600)
    for each, story in zip(both, stories, strict=True):
        each.check(story)


def test_each_host_has_two_of_the_ranks(hosts: LoopbackServers) -> None:
    for host, server in enumerate(hosts.servers):
        assert server.directory is not None
        told = read_status(server.directory)
        assert set(map(int, told["ranks"])) == set(range(host * RANKS_EACH, (host + 1) * RANKS_EACH))
        assert told["other_hosts"].keys() == {f"node-{1 - host}"}
