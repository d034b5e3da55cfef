"""The share of each backup service: complete, on different hosts, stable, never only beside the live copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eep.experts.backup.shares import NOWHERE, choose_share, find_only_hosts
from eep.experts.repair.repair_plan import BackupContents

relaxed = settings(max_examples=150)


def shares(hosts: dict[str, int], only: np.ndarray, replicas: int) -> dict[str, np.ndarray]:
    nothing = {name: BackupContents(host, np.zeros(len(only), dtype=bool)) for name, host in hosts.items()}
    return {name: choose_share(name, nothing, only, replicas) for name in hosts}


@relaxed
@given(
    st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 3), min_size=1),
    st.integers(1, 60),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_every_expert_is_kept_on_as_many_hosts_as_asked(
    hosts: dict[str, int], number: int, replicas: int, seed: int
) -> None:
    only = np.random.default_rng(seed).integers(NOWHERE, 4, number)
    taken = shares(hosts, only, replicas)
    different = set(hosts.values())
    for expert in range(number):
        keepers = [name for name in hosts if taken[name][expert]]
        on = {hosts[name] for name in keepers}
        assert len(on) == len(keepers) == min(replicas, len(different)), "one copy per host, none dropped"
        if len(different) > 1:
            assert on != {only[expert]}, "never only beside the only live copy"


@relaxed
@given(st.integers(2, 6), st.integers(1, 2), st.integers(20, 200))
def test_a_lost_service_moves_only_its_own_share(services: int, replicas: int, number: int) -> None:
    hosts = {f"s{index}": index for index in range(services)}
    only = np.full(number, NOWHERE)
    taken = shares(hosts, only, replicas)
    left = {name: BackupContents(hosts[name], taken[name]) for name in hosts if name != "s0"}
    for name in left:
        added = choose_share(name, left, only, replicas)
        assert not (added & ~taken["s0"]).any()
    after = sum((left[name].held | choose_share(name, left, only, replicas)).astype(int) for name in left)
    assert (after == min(replicas, services - 1)).all()


def test_shares_are_about_even() -> None:
    taken = shares({f"host{index}": index for index in range(4)}, np.full(58 * 256, NOWHERE), 1)
    sizes = [int(mine.sum()) for mine in taken.values()]
    assert sum(sizes) == 58 * 256
    assert max(sizes) < 1.1 * min(sizes)


def test_a_copy_beside_the_only_live_one_gets_company() -> None:
    services = {"a": BackupContents(0, np.array([True])), "b": BackupContents(1, np.array([False]))}
    assert choose_share("b", services, np.array([0]), 1).tolist() == [True]
    assert choose_share("b", services, np.array([1]), 1).tolist() == [False]


def test_only_hosts() -> None:
    held = {0: np.array([True, True, False, False]), 1: np.array([True, False, False, True])}
    assert find_only_hosts(held, 4).tolist() == [NOWHERE, 0, NOWHERE, 1]


@pytest.mark.parametrize("hosts", [{"a": 0, "b": 0}, {"a": 0}])
def test_on_one_host_the_live_copy_does_not_matter(hosts: dict[str, int]) -> None:
    taken = shares(hosts, np.zeros(10, dtype=np.int64), 2)
    assert (sum(mine.astype(int) for mine in taken.values()) == 1).all()
