"""``--nnodes`` and what goes with it: which ranks a host has, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from eep.errors import EepError
from eep.experts.backup import transfer_engine
from sglang_patches.options import HostOptions, ServerOptions
from sglang_patches.server import expert_slots, host_flags
from tests.data_plane.transport.requirements import why_no_links
from tests.sglang_patches.server.arguments import given

_reason = why_no_links()
needs_links = pytest.mark.skipif(_reason is not None, reason=str(_reason))


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return write_key(tmp_path, os.urandom(32))


def write_key(place: Path, key: bytes, mode: int = 0o600) -> str:
    file = place / "key"
    file.write_bytes(key)
    file.chmod(mode)
    return str(file)


def parse(key_file: str, max_ranks: int = 4, device: str = "cpu", **changes: Any) -> HostOptions | None:
    asked = {
        "nnodes": 2,
        "eep_instance": "prod",
        "eep_address": "127.0.0.1",
        "eep_key_file": key_file,
        "eep_store": "http://127.0.0.1:2379",
    }
    return host_flags.parse_host(given(**{**asked, **changes}), max_ranks, device)


def refusal(key_file: str, **changes: Any) -> str:
    with pytest.raises(SystemExit) as refused:
        parse(key_file, **changes)
    return str(refused.value)


def test_without_these_flags_all_ranks_are_here() -> None:
    assert host_flags.parse_host(given(), 4, "cpu") is None


@needs_links
def test_hosts_share_the_ranks_evenly(key_file: str) -> None:
    hosts = [parse(key_file, node_rank=number) for number in range(2)]
    assert [list(host.ranks) for host in hosts if host is not None] == [[0, 1], [2, 3]]


@needs_links
def test_a_host_may_be_added_where_there_is_room(key_file: str) -> None:
    host = parse(key_file, max_ranks=6, node_rank=2)
    assert host is not None
    assert list(host.ranks) == [4, 5]
    assert "not from 0 to 1" in refusal(key_file, node_rank=2)
    assert "no multiple of the 2 ranks" in refusal(key_file, max_ranks=5)


@needs_links
def test_an_instance_may_begin_with_one_host(key_file: str) -> None:
    host = parse(key_file, nnodes=1, max_ranks=8)
    assert host is not None
    assert list(host.ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize("missing", ["eep_instance", "eep_address", "eep_key_file", "eep_store"])
def test_a_flag_that_is_missing_is_named(key_file: str, missing: str) -> None:
    assert "--" + missing.replace("_", "-") in refusal(key_file, **{missing: None})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp_size": 5}, "cannot be shared evenly"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"eep_backup": "live"}, "--eep-backup"),
        ({"eep_on_lost_coverage": "mask"}, "--eep-on-lost-coverage"),
        ({"eep_host_timeout_s": 0.0}, "--eep-host-timeout-s 0"),
        ({"eep_instance": "a/b"}, "is no name"),
        ({"eep_address": "localhost"}, "is no address"),
        ({"eep_address": "0.0.0.0"}, "name one address of this host"),
        ({"eep_address": "192.0.2.1"}, "is not an address of this host"),
    ],
)
def test_what_is_refused(key_file: str, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(key_file, **changes)


@needs_links
def test_ranks_on_a_gpu_need_no_mooncake(key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise EepError("there is no Mooncake")

    monkeypatch.setattr(transfer_engine, "require_mooncake", fail)
    assert "there is no Mooncake" in refusal(key_file)
    assert parse(key_file, device="cuda") is not None


@needs_links
def test_a_provider_that_libfabric_does_not_have_is_refused(key_file: str) -> None:
    assert "--eep-provider carrier-pigeon" in refusal(key_file, eep_provider="carrier-pigeon")


def test_a_key_must_be_whole_and_private(tmp_path: Path) -> None:
    assert "has 3 bytes where 32 are due" in refusal(write_key(tmp_path, b"abc"))
    assert "can be read by other users" in refusal(write_key(tmp_path, b"k" * 32, 0o644))
    assert "cannot be read" in refusal(str(tmp_path / "none"))


def test_the_ranks_of_other_hosts_are_known() -> None:
    host = HostOptions(number=1, ranks_each=2, instance="i", address="127.0.0.1", key_file="k")
    asked = ServerOptions(ranks=4, max_ranks=6, host=host)
    assert (asked.own_ranks, len(asked.standby_ranks)) == (range(2, 4), 0)
    assert asked.remote_ranks == {0, 1, 4, 5}
    assert [asked.host_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    alone = ServerOptions(ranks=3, max_ranks=4)
    assert (alone.own_ranks, alone.standby_ranks, alone.remote_ranks) == (range(3), range(3, 4), frozenset())


def test_slots_suffice_when_a_host_is_lost() -> None:
    assert (16 + expert_slots.redundant_experts(given(), 16, lost=2)) // 4 * 2 >= 16
