"""Three hosts in network namespaces, each with a node of etcd: a host is lost with its node, or is in the minority."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.common import network_namespaces
from tests.control.links.separate_hosts import SeparateHosts
from tests.control.store import etcd_cluster

TIMEOUT = 3.0
ALL = (0, 1, 2)

_reason = etcd_cluster.why_not() or network_namespaces.why_not()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeparateHosts]:
    running = SeparateHosts(tmp_path_factory.mktemp("h"), 3, ALL, TIMEOUT)
    yield running
    running.close()


@pytest.mark.parametrize("both_ways", [True, False])
def test_the_minority_stops_and_returns(hosts: SeparateHosts, both_ways: bool) -> None:
    hosts.until("forming", lambda: hosts.run_with(*ALL))
    before = hosts.incarnations(2)
    hosts.network.isolate(2, both_ways=both_ways)
    hosts.until("the majority going on", lambda: hosts.run_with(0, 1))
    assert hosts.status(2)["phase"] == "REVOKED"
    hosts.network.heal()
    hosts.until("its return", lambda: hosts.run_with(*ALL))
    assert min(hosts.incarnations(2)) > max(before)


def test_a_host_that_is_lost_with_its_node_of_etcd_is_out(hosts: SeparateHosts) -> None:
    hosts.until("forming", lambda: hosts.run_with(*ALL))
    hosts.kill(0)
    hosts.kill_node(0)
    hosts.until("going on without it", lambda: hosts.run_with(1, 2))
