"""Dispatch and combine on CUDA tensors between two hosts: two addresses of the loopback network, all ranks on one GPU.

Needs libfabric. Where it cannot be installed, a folder with its files will do. With Debian's packages: 'apt-get download'
libfabric1, libfabric-dev, libibverbs1, ibverbs-providers, librdmacm1, libnl-3-200, libnl-route-3-200, libnuma1, libpsm2-2,
libpsm-infinipath1, libuuid1 and libatomic1, and 'dpkg -x' each into a folder F. Copy the libraries in
F/usr/lib/x86_64-linux-gnu and F/lib/x86_64-linux-gnu into one folder L, and
F/usr/lib/libpsm1/libpsm_infinipath.so.1.16 as L/libpsm_infinipath.so.1: 4 MB. Build with CPLUS_INCLUDE_PATH=F/usr/include,
and run with LD_LIBRARY_PATH=L.

A GPU that uses memory of a process faults when that is killed, and MPS shares the fault with all processes. So tests that
kill a rank run without MPS, where ranks take turns.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from eep import faults
from eep.abi import native
from eep.faults.injection import ACTIONS
from tests.data_plane.transport.host_ranks import HostRankProgram, HostRanks, HostsConfig
from tests.data_plane.transport.requirements import why_no_links
from tests.gpu.graph_ranks import GraphProgram

ALL, VICTIM, SURVIVORS = (0, 1, 2, 3), 2, (0, 1, 3)
ONE_EACH = (0, 2)
SOON_MS, PATIENT_MS = 3000.0, 60_000.0
CONFIG = HostsConfig(device="cuda", addresses=("127.0.0.1", "127.0.0.2"), hidden=512, max_tokens=16)

_reason = why_no_links("cuda")
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


class HostGpuProgram(HostRankProgram):
    """A rank on a GPU. Its proxy is that of the library for GPUs, which has fault points of its own."""

    def arm(self, point: str, action: str, skip: int = 0, sleep_ms: float = 0) -> None:
        library, number = native.load(self.config.device), faults.kernel_points().index(point)
        native.check(library, library.eep_fault_arm(number, ACTIONS[action], skip, int(sleep_ms * 1000)))


class HostGraphProgram(HostGpuProgram, GraphProgram):
    """A rank whose step is a captured graph, and whose peers may be on another host."""


def started(
    path: pathlib.Path, config: HostsConfig, ranks: tuple[int, ...], timeout_ms: float = PATIENT_MS
) -> HostRanks:
    group = HostRanks(path, config, timeout_ms, HostGpuProgram)
    group.start(ranks)
    group.all(ranks, "warm_up")
    group.connect(ranks)
    return group


@pytest.fixture
def group(tmp_path: pathlib.Path) -> Iterator[HostRanks]:
    with started(tmp_path / "r", CONFIG, ALL) as ranks:
        yield ranks


@pytest.mark.parametrize("shares_gpu", [False, True])
@pytest.mark.parametrize("provider", ["tcp", "tcp;ofi_rxm"])
@pytest.mark.parametrize(
    ("layout", "wire"), [("rank", "bf16"), ("rank", "fp8"), ("expert", "fp8_ue8m0"), ("expert", "f32")]
)
def test_results_are_those_of_one_host(
    tmp_path: pathlib.Path, layout: str, wire: str, provider: str, shares_gpu: bool
) -> None:
    config = dataclasses.replace(CONFIG, layout=layout, wire=wire, provider=provider, shares_gpu=shares_gpu)
    with started(tmp_path / "r", config, ALL) as group:
        group.check_steps(ALL, seed=1, count=20)


@pytest.mark.parametrize("hidden", [7168, 1048])
def test_rows_of_a_model_and_of_an_odd_size(tmp_path: pathlib.Path, hidden: int) -> None:
    config = dataclasses.replace(CONFIG, hidden=hidden, max_tokens=128, topk=8, local_experts=8)
    with started(tmp_path / "r", config, ALL) as group:
        group.check_steps(ALL, seed=2, count=10)


def test_large_and_small_rounds_take_turns(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(CONFIG, hidden=4096, max_tokens=1024)
    with started(tmp_path / "r", config, ONE_EACH) as group:
        group.check_steps(ONE_EACH, seed=1, count=16)


@pytest.mark.without_mps
def test_captured_graphs_replay_while_a_rank_is_killed_and_returns(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(CONFIG, hidden=2048)
    with HostRanks(tmp_path / "r", config, SOON_MS, HostGraphProgram) as group:
        group.start(ALL)
        addresses = group.all(ALL, "capture")
        group.connect(ALL)
        check_replays(group, ALL, seed=0, count=40)
        for cycle, victim in enumerate((2, 0, 3)):
            survivors = tuple(rank for rank in ALL if rank != victim)
            group.begin(ALL, "replay", 1000 * (cycle + 1), ALL, 100_000)
            group[victim].kill()
            for rank in survivors:
                done, status = group[rank].answer()
                assert victim in status.suspects
                assert done > 0
            group.connect(survivors)
            check_replays(group, survivors, seed=10_000, count=10)
            group.lives[victim] += 1
            group.launch(victim)
            addresses[victim] = group[victim].call("capture")
            group.connect(ALL)
            check_replays(group, ALL, seed=20_000, count=20)
        assert group.all(ALL, "addresses") == addresses


def check_replays(group: HostRanks, ranks: tuple[int, ...], seed: int, count: int) -> None:
    for rank, (done, status) in group.all(ranks, "replay", seed, ranks, count).items():
        assert status.ok, f"rank {rank}: {status}"
        assert done == count


@pytest.mark.without_mps
@pytest.mark.parametrize("point", ["hosts.mid_rows", "hosts.after_rows", "hosts.received"])
@pytest.mark.parametrize("skip", [0, 3, 9])
def test_a_rank_is_killed_in_the_middle_of_what_its_proxy_does(group: HostRanks, point: str, skip: int) -> None:
    group.all(SURVIVORS, "set_timeout", SOON_MS)
    group[VICTIM].call("arm", point, "kill", skip)
    for rank in ALL:
        group[rank].send("step", 50, ALL, 100_000)
    for rank in SURVIVORS:
        outputs, status = group[rank].answer()
        group.check_outputs(rank, outputs, 50, ALL)
        assert VICTIM in status.suspects, f"rank {rank}: {status}"
    group[VICTIM].wait_until_dead()
    group.all(SURVIVORS, "set_timeout", PATIENT_MS)
    group.connect(SURVIVORS)
    group.check_steps(SURVIVORS, seed=60, count=3)
    group.lives[VICTIM] += 1
    group.launch(VICTIM)
    group[VICTIM].call("warm_up")
    group.connect(ALL)
    group.check_steps(ALL, seed=70, count=3)


def test_a_revoke_frees_ranks_of_the_other_host_too(group: HostRanks) -> None:
    group.all(ALL, "set_timeout", 900_000)
    for rank in (0, 1):
        group[rank].send("step", 1, (0, 1, 3))
    group[3].call("revoke")
    for rank in (0, 1):
        outputs, status = group[rank].answer()
        assert not outputs
        assert status.revoked
    group.connect(ALL)
    group.check_steps(ALL, seed=9, count=2)


def test_barriers_cross(group: HostRanks) -> None:
    for _ in range(50):
        group.all(ALL, "barrier")


@pytest.mark.without_mps
def test_a_rank_that_is_alone_on_its_host_waits_for_no_link(group: HostRanks) -> None:
    group[2].kill()
    group[3].kill()
    group.connect((0, 1))
    group.check_steps((0, 1), seed=3, count=5)


@pytest.mark.without_mps
def test_lives_that_come_and_go_leave_nothing_behind(group: HostRanks) -> None:
    held = []
    for cycle in range(4):
        group[VICTIM].kill()
        group.connect(SURVIVORS)
        group.lives[VICTIM] += 1
        group.launch(VICTIM)
        group[VICTIM].call("warm_up")
        group.connect(ALL)
        group.check_steps(ALL, seed=cycle)
        held.append([group.all(SURVIVORS, each) for each in ("memories", "descriptors")])
    assert held[-1] == held[1]
