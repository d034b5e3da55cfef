"""Coverage on two hosts: experts come from ranks of the other host, through Mooncake. What lies or is gone is passed over.

Both hosts are in this process: each has its directory, and its ranks their own engines.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from eep.errors import EepError
from eep.experts.backup.backup_client import BackupClient, LiveParameters
from eep.experts.backup.service import BackupOptions, BackupService
from eep.experts.backup.starting_engine import StartingEngine
from eep.experts.backup.transfer_engine import Engine
from eep.experts.instance_hosts import InstanceHosts
from eep.experts.margin_record import read_margin
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.experts.registry.published_records import RankRecord, decode_record, encode_record
from eep.experts.repair.repair_plan import Tier
from eep.operations.held_experts import read_held
from eep.view import View
from tests.experts import model
from tests.experts.covered import RANKS, Rank, enter
from tests.ports import free_ports

pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine (pip install 'eep[backup]')")

HOST_OF = ("a", "a", "b", "b")
SLOTS = 4
EXPERT_BYTES = model.layout(1).expert_bytes


class TwoHosts:
    """Four ranks, with the registry that all of them see in a directory."""

    def __init__(self, base: Path, engines: Sequence[Engine]) -> None:
        self.base, self.ranks, self.lives, self._engines = base, dict[int, Rank](), [0] * RANKS, engines
        self.registry = DirectoryRegistry(base / "store")
        self.disk: Path | None = model.save_checkpoint(base / "model")
        self.epoch = 0

    def directory(self, rank: int) -> Path:
        return self.base / HOST_OF[rank]

    def start(
        self, rank: int, *, empty: bool = False, backup: BackupClient | None = None, other_model: bool = False
    ) -> Rank:
        hosts = InstanceHosts(HOST_OF, HOST_OF[rank], DirectoryRegistry(self.base / "store"), self._engines[rank])
        made = Rank(
            *(self.directory(rank), rank, SLOTS, self.disk, self.lives[rank]),
            backup=backup,
            hosts=hosts,
            empty=empty,
            other_model=other_model,
        )
        self.ranks[rank] = made
        return made

    def replace(self, rank: int, *, backup: BackupClient | None = None, other_model: bool = False) -> Rank:
        """By a life that has nothing, or another model."""
        self.ranks[rank].close()
        self.lives[rank] += 1
        return self.start(rank, empty=not other_model, backup=backup, other_model=other_model)

    def view(self, *active: int) -> View:
        self.epoch += 1
        return View(self.epoch, active, tuple(self.lives))

    def enter(self, *active: int) -> None:
        enter(self.ranks, self.view(*active))

    def brought_in(self, rank: int) -> dict[Tier, int]:
        """How many experts came from each kind of source."""
        found = self.ranks[rank].coverage.brought_in
        return {tier: size // EXPERT_BYTES for tier, size in found.items()}

    def record(self, rank: int) -> tuple[str, RankRecord]:
        key = f"held/r{rank}.i{self.lives[rank]}"
        return key, decode_record(self.registry.scan(key)[key], RankRecord)

    def replace_record(self, rank: int, value: bytes) -> None:
        """What the store says of ``rank`` from now on. Its own thread has said all that it has to say."""
        key, _ = self.record(rank)
        self.registry.publish(key, value)


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """One for each rank, and for all of its lives: to start one takes a while."""
    return [Engine(read_within=1.0) for _ in range(RANKS)]


@pytest.fixture
def hosts(tmp_path: Path, engines: list[Engine]) -> Iterator[TwoHosts]:
    two = TwoHosts(tmp_path, engines)
    for rank in range(RANKS):
        two.start(rank)
    yield two
    for rank in two.ranks.values():
        rank.close()


def test_a_host_may_go_and_nothing_is_brought_in(hosts: TwoHosts) -> None:
    hosts.enter(0, 1, 2, 3)
    for host in "ab":
        margin = read_margin(hosts.base / host, hosts.epoch)
        assert margin is not None
        assert margin["any_hosts"] == 1
        assert margin["hosts"] == (0, 2), "a rank of each host that could go"
        held = read_held(hosts.base / host, {rank: 0 for rank in range(RANKS) if HOST_OF[rank] == host})
        assert held.copies == [[2] * model.EXPERTS] * model.LAYERS, "what the other host holds counts too"
    hosts.enter(0, 1)
    assert read_held(hosts.base / "a", {0: 0, 1: 0}).copies == [[1] * model.EXPERTS] * model.LAYERS
    margin = read_margin(hosts.base / "a", hosts.epoch)
    assert margin is not None
    assert (margin["any_hosts"], margin["hosts"]) == (0, ())
    assert not hosts.brought_in(0)
    assert not hosts.brought_in(1)


def test_a_host_that_comes_back_with_nothing_reads_from_the_other(hosts: TwoHosts) -> None:
    hosts.enter(0, 1)
    for rank in (2, 3):
        hosts.replace(rank)
    hosts.enter(0, 1, 2, 3)
    for rank in (2, 3):
        assert hosts.brought_in(rank) == {Tier.FAR_PEER: SLOTS * model.LAYERS}


def test_a_rank_with_another_model_does_not_join(hosts: TwoHosts, caplog: pytest.LogCaptureFixture) -> None:
    """And those that serve stay."""
    hosts.enter(0, 1, 2)
    hosts.replace(3, other_model=True)
    view = hosts.view(0, 1, 2, 3)
    with pytest.raises(EepError, match="rank 3 on b has loaded other experts than rank 1 on a"):
        hosts.ranks[3].coverage.repair(view)
    assert hosts.ranks[3].index.is_clear, "the next life loads what is on the disk then"
    for rank in range(3):
        assert hosts.ranks[rank].coverage.repair(view) is not None
    assert "rank 1 on a has loaded other experts than rank 3 on b" in caplog.text
    hosts.replace(3)
    caplog.clear()
    hosts.enter(0, 1, 2, 3)
    assert "other experts" not in caplog.text


def test_a_rank_whose_experts_lie_in_a_form_of_their_own_joins(
    hosts: TwoHosts, caplog: pytest.LogCaptureFixture
) -> None:
    """No reader of a checkpoint: copies may differ where no kernel looks."""
    hosts.enter(0, 1, 2)
    hosts.disk = None
    hosts.replace(3, other_model=True)
    view = hosts.view(0, 1, 2, 3)
    assert hosts.ranks[3].coverage.repair(view) is not None
    assert "rank 3 on b has loaded other experts" in caplog.text


def test_hosts_that_begin_with_different_models_serve_nothing(tmp_path: Path, engines: list[Engine]) -> None:
    hosts = TwoHosts(tmp_path, engines)
    for rank in range(RANKS):
        hosts.start(rank, other_model=HOST_OF[rank] == "b")
    view = hosts.view(*range(RANKS))
    for number, rank in hosts.ranks.items():
        with pytest.raises(EepError, match="give all hosts the same model") as refused:
            rank.coverage.repair(view)
        _, _, others = str(refused.value).partition("than rank")
        assert f"on {HOST_OF[number]}" not in others, "ranks of the same host have the same model"
        assert rank.shown is None
    for rank in hosts.ranks.values():
        rank.close()


def test_a_rank_of_the_same_host_and_its_backup_come_first(hosts: TwoHosts, engines: list[Engine]) -> None:
    """Of what rank 2 lacks, the backup of its host has the first layer. Rank 3 has nothing that rank 2 needs."""
    hosts.enter(0, 1, 2, 3)
    backup = BackupService(hosts.registry, Engine(), BackupOptions("b", 1, 1 << 30), print)
    first = hosts.ranks[0].first
    live = LiveParameters(hosts.registry, engines[3], 2, 1, hosts.ranks[2].shared)
    only = np.where(np.arange(model.LAYERS)[:, None] == 0, first.physical_to_logical, -1)
    live.publish(model.layout(SLOTS), type(first)(only, model.EXPERTS, SLOTS), model.checksums())
    backup.start()
    assert backup.refresh() == SLOTS
    client = BackupClient(hosts.registry, engines[2], model.layout(SLOTS), model.EXPERTS)
    hosts.replace(2, backup=client)
    hosts.enter(0, 1, 2, 3)
    found = hosts.brought_in(2)
    assert found[Tier.DRAM] == SLOTS
    assert found[Tier.FAR_PEER] == SLOTS * (model.LAYERS - 1)
    backup.stop()


def _wrong_bytes(hosts: TwoHosts) -> None:
    for rank in (0, 1):
        shared = hosts.ranks[rank].shared
        shared.bytes_at(0, shared.size).fill_(3)


def _wrong_address(hosts: TwoHosts) -> None:
    for rank in (0, 1):
        _, record = hosts.record(rank)
        hosts.replace_record(rank, encode_record(msgspec.structs.replace(record, address=record.address + (1 << 30))))


def _address_that_cannot_be(hosts: TwoHosts) -> None:
    for rank in (0, 1):
        _, record = hosts.record(rank)
        hosts.replace_record(rank, encode_record(msgspec.structs.replace(record, address=(1 << 63) - 1)))


def _garbage(hosts: TwoHosts) -> None:
    for rank in (0, 1):
        hosts.replace_record(rank, os.urandom(500))


def _other_sizes(hosts: TwoHosts) -> None:
    for rank in (0, 1):
        _, record = hosts.record(rank)
        shape = msgspec.structs.replace(record.shape, tensor_bytes=tuple(2 * n for n in record.shape.tensor_bytes))
        hosts.replace_record(rank, encode_record(msgspec.structs.replace(record, shape=shape)))


def _engine_gone(hosts: TwoHosts) -> None:
    (port,) = free_ports(1)
    for rank in (0, 1):
        _, record = hosts.record(rank)
        hosts.replace_record(rank, encode_record(msgspec.structs.replace(record, session=f"127.0.0.1:{port}")))


def _no_engine(hosts: TwoHosts) -> None:
    for rank in (0, 1):
        _, record = hosts.record(rank)
        hosts.replace_record(rank, encode_record(msgspec.structs.replace(record, session="no engine")))


LIES = [_wrong_bytes, _wrong_address, _address_that_cannot_be, _garbage, _other_sizes, _engine_gone, _no_engine]


@pytest.mark.parametrize("lie", LIES, ids=lambda each: each.__name__.strip("_"))
def test_what_a_rank_of_another_host_gets_wrong_comes_from_disk(
    hosts: TwoHosts, lie: Callable[[TwoHosts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eep.experts.coverage._HEARD_WITHIN_S", 0.2)
    hosts.enter(0, 1, 2, 3)
    rank = hosts.replace(2)
    lie(hosts)
    view = hosts.view(0, 1, 2, 3)
    assert rank.coverage.repair(view)
    rank.check()
    assert hosts.brought_in(2) == {Tier.DISK: SLOTS * model.LAYERS}


def test_an_engine_that_takes_connections_and_says_nothing_is_given_up(hosts: TwoHosts) -> None:
    hosts.enter(0, 1, 2, 3)
    rank = hosts.replace(2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for other in (0, 1):
            _, record = hosts.record(other)
            session = f"127.0.0.1:{silent.getsockname()[1]}"
            hosts.replace_record(other, encode_record(msgspec.structs.replace(record, session=session)))
        assert rank.coverage.repair(hosts.view(0, 1, 2, 3))
    rank.check()
    assert hosts.brought_in(2) == {Tier.DISK: SLOTS * model.LAYERS}


def test_a_rank_whose_engine_does_not_start_serves_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = DirectoryRegistry(tmp_path / "store")
    hosts = InstanceHosts(HOST_OF, "a", registry, StartingEngine("0.0.0.0"))
    rank = Rank(tmp_path / "a", 0, 2 * SLOTS, None, hosts=hosts)
    assert "other hosts cannot read experts from rank 0" in caplog.text
    assert rank.coverage.repair(View(1, (0,), (0,) * RANKS))
    rank.check()
    rank.close()


def test_experts_do_not_move_between_hosts_while_ranks_serve(tmp_path: Path) -> None:
    registry = DirectoryRegistry(tmp_path / "store")
    hosts = InstanceHosts(HOST_OF, "a", registry, StartingEngine("127.0.0.1"))
    with pytest.raises(EepError, match="all ranks are on one host"):
        Rank(tmp_path / "a", 0, SLOTS, None, hosts=hosts, staged=2)
