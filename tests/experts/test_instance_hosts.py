"""The hosts of an instance, as its experts see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from eep.experts.instance_hosts import InstanceHosts


class NoTransport:
    session = "nowhere"

    def expose(self, memory: Any) -> int:
        raise NotImplementedError

    def withdraw(self, address: int) -> None:
        raise NotImplementedError

    def read(self, session: str, parts: Sequence[Any]) -> None:
        raise NotImplementedError


class NoRegistry:
    def publish(self, key: str, value: bytes) -> None: ...

    def withdraw(self, key: str) -> None: ...

    def scan(self, prefix: str) -> dict[str, bytes]:
        return {}


def hosts(own: str, host_of: tuple[str, ...] = ("b", "b", "a", "c")) -> InstanceHosts:
    return InstanceHosts(host_of, own, NoRegistry(), NoTransport())


def test_all_hosts_give_each_other_the_same_numbers() -> None:
    assert {hosts(own).topology for own in "abc"} == {(1, 1, 0, 2)}
    assert [hosts(own).number for own in "abc"] == [0, 1, 2]


def test_ranks_of_the_own_host_are_near() -> None:
    assert [hosts("b").is_near(rank) for rank in range(4)] == [True, True, False, False]


def test_a_host_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank is on it"):
        hosts("d")
