"""Dispatch and combine between two hosts in network namespaces: exact, whatever is lost on the way.

With two ranks on each host a thread moves what crosses; with one on each the kernels do, while they wait (a loan)."""

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
ONE_EACH = (0, 2)
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


def test_large_and_small_rounds_take_turns(network: network_namespaces.Network, tmp_path: pathlib.Path) -> None:
    """Rows of 8 KiB, 1 to 512 of them: kernels move up to 256 themselves, and each rank has another number than its peer."""
    config = config_of(network, hidden=4096, max_tokens=512)
    with HostRanks(tmp_path / "r", config, PATIENT_MS) as group:
        group.start(ONE_EACH)
        group.connect(ONE_EACH)
        group.check_steps(ONE_EACH, seed=1, count=16)


# ---- what is lost ----

# Before these points the victim owes something to every survivor. Past them some survivors may have all they need.
OWES_ALL = [
    *["dispatch.before_rows", "dispatch.mid_rows", "dispatch.after_rows", "dispatch.mid_flags", "dispatch.after_flags"],
    *["dispatch.received", "combine.before_rows", "combine.after_rows", "hosts.mid_rows", "hosts.after_rows"],
    "hosts.received",
]
OWES_SOME = ["combine.mid_flags", "combine.after_flags", "combine.mid_pull"]
COMBINING = ["hosts.mid_rows", "hosts.after_rows", "hosts.received"]
"""As the victim sends what its experts made: after a dispatch to each of its peers, or from each."""


def test_every_point_of_an_exchange_is_killed_at() -> None:
    tried = {*OWES_ALL, *OWES_SOME, *COMBINING}
    assert tried == {name for name in faults.points() if name.startswith(("dispatch.", "combine.", "hosts."))}


@pytest.mark.parametrize("here", [(0, 1, 2), ONE_EACH], ids=["two survivors", "one survivor"])
@pytest.mark.parametrize("part", ["dispatch", "until combine", "combine"])
def test_kill_at_every_point(
    network: network_namespaces.Network, tmp_path: pathlib.Path, part: str, here: tuple[int, ...]
) -> None:
    """The victim is alone on its host, so that the survivors hear of its end from their links alone."""
    survivors = tuple(rank for rank in here if rank != VICTIM)
    peers = len(survivors)
    points = {
        "dispatch": [(point, 0) for point in OWES_ALL[:6]],
        "until combine": [(point, 0) for point in OWES_ALL[6:]],
        "combine": [
            *[(point, 0) for point in OWES_SOME],
            *[(point, peers) for point in COMBINING],
            ("hosts.after_rows", 2 * peers - 1),
        ],
    }[part]
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
            if part != "combine":
                assert suspected == peers, point
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
    check_that_a_revoke_frees(group, (0, 1), revoker=3)
    group.connect(ALL)
    group.check_steps(ALL, seed=9, count=2)


def check_that_a_revoke_frees(group: HostRanks, waiting: tuple[int, ...], revoker: int) -> None:
    for rank in waiting:
        group[rank].send("step", 1, (*waiting, revoker))
    group[revoker].call("revoke")
    for rank in waiting:
        outputs, status = group[rank].answer()
        assert not outputs
        assert status.revoked


def test_a_revoke_frees_a_kernel_that_moves_what_it_waits_for(
    network: network_namespaces.Network, tmp_path: pathlib.Path
) -> None:
    with HostRanks(tmp_path / "r", config_of(network), 900_000) as group:
        group.start(ONE_EACH)
        for seed in range(10, 20):
            group.connect(ONE_EACH)
            check_that_a_revoke_frees(group, (0,), revoker=2)
            group.connect(ONE_EACH)
            group.check_steps(ONE_EACH, seed)


@pytest.mark.parametrize("here", [ALL, ONE_EACH], ids=["two on each host", "one on each host"])
def test_a_cable_that_is_pulled_ends_the_step_and_not_the_instance(
    network: network_namespaces.Network, tmp_path: pathlib.Path, here: tuple[int, ...]
) -> None:
    with HostRanks(tmp_path / "r", config_of(network), PATIENT_MS) as group:
        group.start(here)
        group.connect(here)
        group.check_steps(here, seed=1)
        network.isolate(0, both_ways=True)
        try:
            group.all(here, "set_timeout", 500.0)
            for rank in here:
                group[rank].send("step", 2, here)
            for rank in here:
                outputs, status = group[rank].answer()
                assert not outputs
                assert set(status.suspects) & {other for other in here if other // 2 != rank // 2}
        finally:
            network.heal()
        group.all(here, "set_timeout", PATIENT_MS)
        # The control plane keeps them all; what was on its way arrives late, and counts for nothing.
        group.connect(here)
        group.check_steps(here, seed=3, count=3)


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
