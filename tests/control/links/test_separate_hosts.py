"""Real supervisors in network namespaces, a real etcd, and leases that never end: only silence takes a host out."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from bench.common import network_namespaces
from tests.control.links.separate_hosts import SeparateHosts
from tests.control.store import etcd_cluster

TIMEOUT = 3.0
BOTH = (0, 1)
STORE = 2

_reason = etcd_cluster.why_not() or network_namespaces.why_not()
pytestmark = [
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeparateHosts]:
    running = SeparateHosts(tmp_path_factory.mktemp("h"), 2, [STORE], TIMEOUT)
    yield running
    running.close()


def lives(hosts: SeparateHosts) -> list[list[int]]:
    return [hosts.incarnations(host) for host in BOTH]


def check_new_lives(hosts: SeparateHosts, host: int, before: list[int]) -> None:
    """Each rank by itself: another test may have killed one of them, which is a life ahead since."""
    now = hosts.incarnations(host)
    assert all(life > earlier for life, earlier in zip(now, before, strict=True)), "a removed rank came back as itself"


@pytest.fixture
def formed(hosts: SeparateHosts) -> SeparateHosts:
    hosts.network.heal()
    hosts.until("forming", lambda: hosts.run_with(*BOTH))
    return hosts


@pytest.mark.parametrize("coordinates", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_dead_host_is_out_and_returns(formed: SeparateHosts, coordinates: bool) -> None:
    coordinator = int(formed.status(0)["coordinator"][1])
    lost = coordinator if coordinates else 1 - coordinator
    before = formed.incarnations(lost)
    formed.kill(lost)
    formed.until("going on without it", lambda: formed.run_with(1 - lost))
    formed.start(lost)
    formed.until("its return", lambda: formed.run_with(*BOTH))
    check_new_lives(formed, lost, before)


def test_a_host_that_is_cut_off_stops_and_returns(formed: SeparateHosts) -> None:
    before = formed.incarnations(1)
    formed.network.isolate(1, both_ways=True)
    formed.until("going on without it", lambda: formed.run_with(0))
    assert formed.status(1)["phase"] == "REVOKED", "it may not run when it is taken for lost"
    formed.network.heal()
    formed.until("its return", lambda: formed.run_with(*BOTH))
    check_new_lives(formed, 1, before)


def test_hosts_that_lost_only_their_link_go_on(formed: SeparateHosts) -> None:
    """They reach the store, so neither is lost to the other. These ranks exchange no tokens, so none is accused."""
    before = lives(formed)
    formed.network.cut(0, 1)
    formed.network.cut(1, 0)
    formed.until("the link being down", lambda: not any(any(formed.status(host)["links"].values()) for host in BOTH))
    # A rank of the one dies, and the other is told by way of the store. The next life waits for the link: a view with it
    # would never settle if its tokens reach the other host no better than what its supervisor says.
    formed.kill_rank(1, 2)
    formed.until("a new life", lambda: formed.incarnations(1)[0] > before[1][0])
    formed.until("that life being ready", lambda: formed.status(1)["ranks"]["2"]["status"] == "ready")
    epoch = formed.status(0)["epoch"]
    time.sleep(TIMEOUT)
    assert formed.status(1)["missing_links"] == ["h0"]
    assert (formed.status(0)["epoch"], formed.status(0)["active"]) == (epoch, [0, 1, 3])
    formed.network.heal()
    formed.until("the link being up", lambda: formed.run_with(*BOTH))
    assert [formed.incarnations(0), formed.incarnations(1)[1:]] == [before[0], before[1][1:]], "a bystander was removed"


@pytest.mark.long
@pytest.mark.parametrize("source", BOTH)
def test_hosts_whose_link_is_cut_one_way_go_on(formed: SeparateHosts, source: int) -> None:
    before = lives(formed)
    formed.network.cut(source, 1 - source)
    formed.until("the link being down", lambda: not any(any(formed.status(host)["links"].values()) for host in BOTH))
    assert lives(formed) == before
    formed.network.heal()
    formed.until("the link being up", lambda: formed.run_with(*BOTH))
    assert lives(formed) == before, "a host was taken out that only lost a link"


@pytest.mark.long
def test_a_host_that_is_cut_off_one_way_stops_and_returns(formed: SeparateHosts) -> None:
    before = formed.incarnations(1)
    formed.network.isolate(1, both_ways=False)
    formed.until("going on without it", lambda: formed.run_with(0))
    # It still hears: it may know of the view without its ranks, and have ended them, or hold them until it does.
    told = formed.status(1)
    assert told["phase"] == "REVOKED" or not any(rank["in"] for rank in told["ranks"].values()), told
    formed.network.heal()
    formed.until("its return", lambda: formed.run_with(*BOTH))
    check_new_lives(formed, 1, before)


@pytest.mark.long
def test_a_host_that_is_cut_off_as_soon_as_it_is_linked_is_out(formed: SeparateHosts) -> None:
    formed.kill(1)
    formed.until("going on without it", lambda: formed.run_with(0))
    formed.network.cut(0, 1)
    formed.network.cut(1, 0)
    formed.start(1)
    formed.until("waiting for a link", lambda: formed.status(1).get("missing_links") == ["h0"])
    assert formed.run_with(0)
    formed.network.heal()
    formed.until("the link being up", lambda: formed.run_with(*BOTH))
    formed.network.isolate(1, both_ways=False)
    formed.until("going on without it again", lambda: formed.run_with(0))
    formed.network.heal()
    formed.until("its return", lambda: formed.run_with(*BOTH))


@pytest.mark.long
def test_a_host_whose_supervisor_is_killed_is_out(formed: SeparateHosts) -> None:
    formed.kill(1, whole=False)
    formed.until("going on without it", lambda: formed.run_with(0))
    formed.start(1)
    formed.until("its return", lambda: formed.run_with(*BOTH))
