"""Dispatch and combine between two hosts in network namespaces, two ranks on each: exact, whatever is lost on the way."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Iterator

import pytest

import eep
from bench.common import network_namespaces
from eep import faults
from tests.data_plane.transport.host_ranks import HostRanks, HostsConfig
from tests.data_plane.transport.requirements import why_no_links
from tests.ranks import DIED

ALL, VICTIM, SURVIVORS = (0, 1, 2, 3), 2, (0, 1, 3)
SOON_MS, PATIENT_MS = 3000.0, 60_000.0

_reason = why_no_links() or network_namespaces.why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


@pytest.fixture(scope="module")
def network() -> Iterator[network_namespaces.Network]:
    network = network_namespaces.Network(2)
    yield network
    network.close()


def config_of(network: network_namespaces.Network, **more: object) -> HostsConfig:
    return HostsConfig(
        namespaces=tuple(map(network.namespace, range(2))),
        addresses=tuple(map(network.address, range(2))),
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def group(network: network_namespaces.Network, tmp_path: pathlib.Path) -> Iterator[HostRanks]:
    with HostRanks(tmp_path / "r", config_of(network), PATIENT_MS) as ranks:
        ranks.start(ALL)
        ranks.connect(ALL)
        yield ranks


@pytest.mark.parametrize(
    ("layout", "wire", "provider"),
    [
        ("rank", "bf16", "tcp"),
        ("rank", "fp8", "tcp"),
        ("expert", "fp8_ue8m0", "tcp"),
        ("expert", "f32", "tcp"),
        ("rank", "bf16", "tcp;ofi_rxm"),
    ],
)
def test_results_are_those_of_one_host(
    network: network_namespaces.Network, tmp_path: pathlib.Path, layout: str, wire: str, provider: str
) -> None:
    config = config_of(network, layout=layout, wire=wire, provider=provider, hidden=512, max_tokens=16)
    with HostRanks(tmp_path / "r", config, PATIENT_MS) as group:
        group.start(ALL)
        group.connect(ALL)
        group.check_steps(ALL, seed=1, count=20)


# ---- what is lost ----

# Before these points the victim owes something to every survivor. Past them some survivors may have all they need.
OWES_ALL = [
    *["dispatch.before_rows", "dispatch.mid_rows", "dispatch.after_rows", "dispatch.mid_flags", "dispatch.after_flags"],
    *["dispatch.received", "combine.before_rows", "combine.after_rows", "hosts.mid_rows", "hosts.after_rows"],
    "hosts.received",
]
OWES_SOME = [("combine.mid_flags", 0), ("combine.after_flags", 0), ("combine.mid_pull", 0)]
# As the victim sends what its experts made: after the rows of a dispatch to each of two peers.
COMBINING = [("hosts.mid_rows", 2), ("hosts.after_rows", 2), ("hosts.after_rows", 3), ("hosts.received", 2)]


def test_every_point_of_an_exchange_is_killed_at() -> None:
    tried = {*OWES_ALL, *[point for point, _ in OWES_SOME + COMBINING]}
    assert tried == {name for name in faults.points() if name.startswith(("dispatch.", "combine.", "hosts."))}


@pytest.mark.parametrize(
    "points",
    [[(point, 0) for point in OWES_ALL[:6]], [(point, 0) for point in OWES_ALL[6:]], OWES_SOME + COMBINING],
    ids=["dispatch", "until combine", "combine"],
)
def test_kill_at_every_point(
    network: network_namespaces.Network, tmp_path: pathlib.Path, points: list[tuple[str, int]]
) -> None:
    """The victim is alone on its host, so that the survivors hear of its end from their links alone."""
    here, survivors = (0, 1, 2), (0, 1)
    config = config_of(network, max_tokens=16)
    with HostRanks(tmp_path / "r", config, PATIENT_MS) as group:
        group.start(here)
        group.connect(here)
        for cycle, (point, skip) in enumerate(points):
            group.check_steps(here, seed=100 * cycle)
            group[VICTIM].call("arm", point, "kill", skip)
            for rank in here:
                group[rank].send("step", 100 * cycle + 50, here)
            suspected = 0
            for rank in survivors:
                outputs, status = group[rank].answer()
                group.check_outputs(rank, outputs, 100 * cycle + 50, here)
                assert status.ok or status.suspects == (VICTIM,), f"{point}, rank {rank}: {status}"
                suspected += not outputs
            group[VICTIM].wait_until_dead()  # perhaps after its answer: its proxy works on when its kernels are done
            assert group[VICTIM].exitcode == -signal.SIGKILL
            if (point, skip) not in OWES_SOME + COMBINING:
                assert suspected == len(survivors), point
            group.connect(survivors)
            group.check_steps(survivors, seed=100 * cycle + 60)
            group.replace(VICTIM, survivors)


def test_a_rank_of_each_kind_is_lost_and_replaced(group: HostRanks) -> None:
    """Of four ranks, two on each host."""
    group.check_steps(ALL, seed=1, count=3)
    group[VICTIM].call("arm", "combine.before_rows", "kill")
    group.all(SURVIVORS, "set_timeout", SOON_MS)
    for rank in ALL:
        group[rank].send("step", 10, ALL)
    for rank in SURVIVORS:
        outputs, status = group[rank].answer()
        assert not outputs
        assert status.suspects == (VICTIM,)
    assert group[VICTIM].answer() == DIED
    group.all(SURVIVORS, "set_timeout", PATIENT_MS)
    group.connect(SURVIVORS)
    group.check_steps(SURVIVORS, seed=20, count=3)
    group.replace(VICTIM, SURVIVORS)
    group.check_steps(ALL, seed=30, count=3)


@pytest.mark.parametrize("point", ["hosts.mid_rows", "hosts.after_rows", "combine.mid_pull"])
def test_a_removed_rank_that_wakes_up_reaches_no_rank(group: HostRanks, point: str) -> None:
    group[VICTIM].call("arm", point, "stop")
    group.all(ALL, "set_timeout", SOON_MS)
    for rank in ALL:
        group[rank].send("step", 1, ALL)
    for rank in SURVIVORS:
        outputs, _ = group[rank].answer()
        group.check_outputs(rank, outputs, 1, ALL)
    group[VICTIM].wait_until_stopped()
    group.all(SURVIVORS, "set_timeout", PATIENT_MS)
    group.connect(SURVIVORS)
    zombie = group[VICTIM]
    group.replace(VICTIM, SURVIVORS)
    for rank in ALL:
        group[rank].send("step", 40, ALL, 40)
    zombie.resume()
    for rank in ALL:
        outputs, status = group[rank].answer()
        assert status.ok, f"rank {rank}: {status}"
        assert len(outputs) == 40
        group.check_outputs(rank, outputs, 40, ALL)
    outputs, status = zombie.answer()
    group.check_outputs(VICTIM, outputs, 1, ALL)
    assert outputs or not status.ok


def test_a_stop_shorter_than_the_deadline_costs_nothing(group: HostRanks) -> None:
    group[VICTIM].call("arm", "hosts.mid_rows", "stop")
    for rank in ALL:
        group[rank].send("step", 3, ALL)
    group[VICTIM].wait_until_stopped()
    group[VICTIM].resume()
    for rank in ALL:
        outputs, status = group[rank].answer()
        assert status.ok, status
        group.check_outputs(rank, outputs, 3, ALL)


def test_a_revoke_frees_ranks_of_the_other_host_too(group: HostRanks) -> None:
    group.all(ALL, "set_timeout", 900_000)
    for rank in (0, 1):
        group[rank].send("step", 1, ALL)
    group[3].call("revoke")
    for rank in (0, 1):
        outputs, status = group[rank].answer()
        assert not outputs
        assert status.revoked
    group.connect(ALL)
    group.check_steps(ALL, seed=9, count=2)


def test_a_cable_that_is_pulled_ends_the_step_and_not_the_instance(
    group: HostRanks, network: network_namespaces.Network
) -> None:
    group.check_steps(ALL, seed=1)
    network.isolate(0, both_ways=True)
    try:
        group.all(ALL, "set_timeout", 500.0)
        for rank in ALL:
            group[rank].send("step", 2, ALL)
        for rank in ALL:
            outputs, status = group[rank].answer()
            assert not outputs
            assert set(status.suspects) & {other for other in ALL if other // 2 != rank // 2}
    finally:
        network.heal()
    group.all(ALL, "set_timeout", PATIENT_MS)
    # The control plane keeps them all; what was on its way arrives late, and counts for nothing.
    group.connect(ALL)
    group.check_steps(ALL, seed=3, count=3)


# ---- finding each other ----


def test_a_peer_that_does_not_announce_itself_leaves_the_view_as_it_was(group: HostRanks) -> None:
    group[VICTIM].kill()
    group.connect(SURVIVORS)
    before = group[0].call("view")
    group.lives[VICTIM] += 1
    group.epoch += 1
    wanted = eep.View(group.epoch, ALL, tuple(group.lives))
    with pytest.raises(eep.PeerUnreachable, match="has not announced itself"):
        group[0].call("apply", wanted, timeout=0.3)
    assert group[0].call("view") == before
    group.launch(VICTIM)
    group.all(ALL, "apply", wanted)
    group.check_steps(ALL, seed=5)


def test_a_slot_is_free_before_the_next_life_but_one_has_it(group: HostRanks) -> None:
    group[VICTIM].kill()
    group.replace(VICTIM, SURVIVORS, incarnation=2)
    group.check_steps(ALL, seed=6, count=2)


def test_lives_that_come_and_go_leave_nothing_behind(group: HostRanks) -> None:
    held = []
    for cycle in range(5):
        group[VICTIM].kill()
        group.connect(SURVIVORS)
        group.replace(VICTIM, SURVIVORS)
        group.check_steps(ALL, seed=cycle)
        held.append([group.all(SURVIVORS, each) for each in ("memories", "descriptors", "threads")])
    assert held[-1] == held[0]


@pytest.mark.parametrize(
    ("other", "says"),
    [({"key": b"x" * 32}, "key of this job"), ({"max_tokens": 9}, "made with other sizes or types")],
)
def test_ranks_that_do_not_belong_together(
    network: network_namespaces.Network, tmp_path: pathlib.Path, other: dict[str, object], says: str
) -> None:
    with HostRanks(tmp_path / "r", config_of(network)) as group:
        group.launch(0)
        group.config = config_of(network, **other)
        group.launch(2)
        view = group.view_of([0, 2])
        with pytest.raises(eep.PeerUnreachable, match="has not announced itself"):
            group[2].call("apply", view, timeout=0.0)  # by now it has announced itself
        for rank in (0, 2):
            with pytest.raises(eep.PeerUnreachable, match=says):
                group[rank].call("apply", view, timeout=0.0)
