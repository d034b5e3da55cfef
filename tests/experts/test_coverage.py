"""Coverage: the ranks of a view decide where experts are, and every slot holds the right bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eep.errors import EepError
from eep.experts.backup.backup_client import BackupClient
from eep.experts.backup.live_offer import LiveOffer
from eep.experts.backup.service import BackupOptions, BackupService
from eep.experts.backup.transfer_engine import Engine
from eep.experts.checksums import Checksums
from eep.experts.coverage import LACKING
from eep.experts.layout import ExpertLayout
from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import plan_placement
from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.experts.registry.published_records import BACKUPS, BackupRecord, encode_record
from eep.experts.registry.published_records import RANKS as RANK_RECORDS
from eep.experts.repair.executor import RepairFailed
from eep.experts.repair.reader import Want
from eep.view import View
from tests.experts import model
from tests.experts.covered import PATIENCE_S, RANKS, HeldReads, Rank, counts_of, enter, ranks


@pytest.mark.parametrize("disk", [False, True])
def test_losses_one_by_one_and_all_ranks_back(tmp_path: Path, disk: bool) -> None:
    """With room for all experts on every rank nothing need be read from disk."""
    path = model.save_checkpoint(tmp_path / "model") if disk else None
    with ranks(tmp_path, 8, path) as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        first = group[0].shown
        for lost in (1, 3, 0):
            view = view.without([lost])
            group[lost].close()
            enter(group, view)
        for back in (0, 1, 3):
            group[back] = Rank(tmp_path / "e", back, 8, path, incarnation=1)
            view = view.joined_by({back: 1})
            enter(group, view)
        assert group[2].shown is not None
        assert first is not None
        assert group[2].shown.digest == first.digest, "when all are back, so is the first placement"


def test_the_next_life_takes_over_what_the_slots_hold(tmp_path: Path) -> None:
    """Not what it would have loaded: the last life died in a view with other experts in its slots. One slot is spoiled."""
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model")) as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        group[3].close()
        view = view.without([3])
        enter(group, view)
        last = group.pop(1)
        last.coverage.close()
        last.memory.region[last.memory.layout.pieces(0, 2)[0][0]] ^= 1
        group[1] = Rank(tmp_path / "e", 1, 3, tmp_path / "model", incarnation=1, last=last)
        held, first = group[1].held, group[1].first.physical_to_logical[:, 3:6]
        assert held is not None
        assert held[0, 2] == EMPTY
        assert (held == EMPTY).sum() == 1
        assert (held != first).sum() > 1, "it holds what the last view gave it"
        view = view.without([1]).joined_by({1: 1})
        enter(group, view)
        assert (group[1].index.verify(group[1].memory, model.EXPERTS)[0] != EMPTY).all()


def test_a_life_that_lacks_what_no_source_has_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, None) as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        last = group.pop(1)
        last.coverage.close()
        last.memory.region.zero_()
        group[1] = Rank(tmp_path / "e", 1, 2, None, incarnation=1, last=last)
        with pytest.raises(RepairFailed):
            group[1].coverage.repair(view.without([1]).joined_by({1: 1}))
        assert group[1].index.is_clear


LIFE = """
import os, signal, sys
from pathlib import Path
from tests.experts.covered import Rank
Rank(Path(sys.argv[1]), 1, 8, None, int(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_life_removes_what_those_before_it_have_left(tmp_path: Path) -> None:
    """A rank that is killed leaves a socket and a record; the next life of it would leave more, and so on."""
    place = tmp_path / "e"
    for life in range(2):
        killed = subprocess.run([sys.executable, "-c", LIFE, str(place), str(life)], check=False)
        assert killed.returncode == -signal.SIGKILL
    assert len(list(place.rglob("*r1.i*"))) == 2, "the last life has left its socket and its record"
    rank = Rank(place, 1, 8, None, incarnation=2)
    assert sorted(path.name for path in place.rglob("*r1.i*")) == ["experts-r1.i2.sock", "held%2Fr1.i2"]
    rank.close()
    assert list(place.rglob("*r1.i*")) == []


def test_what_only_the_dead_had_comes_from_disk(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model")) as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        group[2].close()
        enter(group, view.without([2]))


def test_too_few_slots_wait_for_a_rank_to_come_back(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, model.save_checkpoint(tmp_path / "model")) as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        group[2].close()
        less = view.without([2])
        assert {group[rank].coverage.repair(less) for rank in less.active} == {None}
        group[2] = Rank(tmp_path / "e", 2, 2, tmp_path / "model", incarnation=1)
        enter(group, less.joined_by({2: 1}))


def test_what_is_used_least_is_masked_and_all_agree_on_it(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model"), "mask") as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        first = group[0].shown
        assert first is not None
        lost = (1, 2)
        for rank in lost:
            group[rank].close()
        less = view.without(lost)
        enter(group, less, masked=True)
        shown = group[0].shown
        assert shown is not None
        for layer in range(model.LAYERS):
            kept = set(first.on(less.active).physical_to_logical[layer].tolist())
            masked = set(np.flatnonzero(shown.masked[layer]).tolist())
            back = set(range(model.EXPERTS)) - kept - masked
            assert masked
            assert not masked & kept, "what the survivors hold they serve"
            assert all(one < other for one in masked for other in back), "the last experts were asked for most"
        for rank in lost:
            group[rank] = Rank(tmp_path / "e", rank, 3, tmp_path / "model", 1, "mask", counts_of(rank))
        enter(group, less.joined_by(dict.fromkeys(lost, 1)))
        assert group[0].shown is not None
        assert group[0].shown.digest == first.digest


class Backup:
    """A backup service in this process, filled from what the ranks offer."""

    def __init__(self, directory: Path, slots: int) -> None:
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine (pip install 'eep[backup]')")
        self.registry = DirectoryRegistry(directory / "backup")
        self.engine = Engine()
        self.said: list[str] = []
        self.service = BackupService(self.registry, Engine(), BackupOptions("host", 0, 1 << 30), self.said.append)
        self.client = BackupClient(self.registry, self.engine, model.layout(slots), model.EXPERTS)
        self.slots = slots

    def offer(self, rank: Rank, copied: bool = False) -> LiveOffer:
        """It looks when it is told to."""
        shared = None if copied else rank.shared
        offer = LiveOffer(rank.rank, self.client, rank.memory, shared, every=3600.0)
        first = plan_placement(np.ones((model.LAYERS, model.EXPERTS)), None, range(RANKS), self.slots, [0] * RANKS)
        offer.holds(model.held(first, rank.rank), rank.sums)
        return offer

    def fill(self, group: dict[int, Rank], copied: bool = False) -> None:
        offers = [self.offer(rank, copied) for rank in group.values()]
        self.service.start()
        for offer in offers:
            offer.look()
        assert len(self.registry.scan(RANK_RECORDS)) == len(group)
        assert self.service.refresh() == model.LAYERS * model.EXPERTS
        for offer in offers:
            offer.look()
        assert self.registry.scan(RANK_RECORDS) == {}, "what no service lacks is not exposed any longer"
        assert not self.engine._exposed

    def close(self) -> None:
        self.service.stop()
        self.registry.close()


@pytest.fixture
def backup(tmp_path: Path) -> Iterator[Backup]:
    made = Backup(tmp_path, 3)
    yield made
    made.close()


def sources(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Where experts came from, as the log has it."""
    lines = [record.getMessage() for record in caplog.records if "brought in" in record.getMessage()]
    return {tier for line in lines for tier in ("local", "peer", "dram", "disk") if f"from {tier}" in line}


@pytest.mark.parametrize("copied", [False, True])
def test_the_backup_has_what_only_the_dead_had(
    tmp_path: Path, backup: Backup, copied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a checkpoint: as for a model that was quantised when it was loaded."""
    caplog.set_level("INFO")
    with ranks(tmp_path, 3, None, backup=backup.client) as group:
        backup.fill(group, copied)
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        group[2].close()
        enter(group, view.without([2]))
        assert "dram" in sources(caplog)


def test_without_a_source_it_waits_for_the_rank_that_brings_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ranks(tmp_path, 3, None) as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        group[2].close()
        smaller = view.without([2])
        answers = {rank: group[rank].coverage.repair(smaller) for rank in smaller.active}
        assert LACKING in answers.values()
        assert "start a backup service" in caplog.text
        # It comes back with what it loads when it starts, and so everything is there again.
        group[2] = Rank(tmp_path / "e", 2, 3, None, incarnation=1)
        enter(group, View(smaller.epoch + 1, (0, 1, 2, 3), (0, 0, 1, 0)))


def test_a_repair_that_takes_longer_than_its_caller_allows_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(1, (0, 1, 2, 3), (0,) * RANKS)
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model"), repair_within=0.1) as group:
        enter(group, view)
        held = HeldReads(monkeypatch)
        group[2].close()
        smaller = view.without([2])
        assert LACKING in [group[rank].coverage.repair(smaller) for rank in smaller.active]
        held.let_go()


def test_a_repair_waits_for_a_slow_source_as_long_as_its_caller_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(1, (0, 1, 2, 3), (0,) * RANKS)
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model"), repair_within=PATIENCE_S) as group:
        enter(group, view)
        held = HeldReads(monkeypatch)
        group[2].close()
        with ThreadPoolExecutor() as beside:
            entered = beside.submit(enter, group, view.without([2]))
            held.wait_until_begun()
            assert not entered.done()
            held.let_go()
            entered.result()


def test_backups_that_are_not_believed_are_no_reason_to_end(
    tmp_path: Path, backup: Backup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(tmp_path, 3, None, backup=backup.client) as group:
        backup.fill(group)
        group[2].close()
        group[0].sums.known[:] = False

        def differ(client: BackupClient) -> Checksums:
            raise EepError("two copies differ")

        monkeypatch.setattr(BackupClient, "checksums", differ)
        assert group[0].coverage.repair(View(2, (0, 1, 3), (0,) * RANKS)) == LACKING


def test_a_rank_that_lacks_what_it_was_started_with_ends(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, None) as group:
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        group[0].coverage._slots.table[:] = -1
        for rank in (1, 2, 3):
            group[rank].close()
        with pytest.raises(RepairFailed, match="start a backup service"):
            group[0].coverage.repair(view)


def dies(backup: Backup) -> None:
    backup.service.stop()


def dies_unseen(backup: Backup) -> None:
    """Its record is there still, its memory is not."""
    for filled in backup.service._filled:
        backup.service.transport.withdraw(filled.extent.address)


def lies(backup: Backup) -> None:
    """Every byte is where another should be."""
    record = backup.client.records()["host"]
    extents = tuple(type(e)(e.address + 1, e.numbers[:-8], e.checksums[:-8]) for e in record.extents)
    forged = BackupRecord(record.host, record.session, record.shape, extents)
    backup.registry.publish(BACKUPS + "host", encode_record(forged))


@pytest.mark.parametrize("trouble", [dies, dies_unseen, lies])
def test_a_backup_that_died_or_lies_is_passed_over(
    tmp_path: Path, backup: Backup, trouble: Callable[[Backup], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with ranks(tmp_path, 3, model.save_checkpoint(tmp_path / "model"), backup=backup.client) as group:
        backup.fill(group)
        view = View(1, (0, 1, 2, 3), (0,) * RANKS)
        enter(group, view)
        trouble(backup)
        group[2].close()
        enter(group, view.without([2]))
        assert "dram" not in sources(caplog)
        assert "disk" in sources(caplog)


def test_a_newcomer_learns_from_the_backup_what_it_has_never_seen(tmp_path: Path, backup: Backup) -> None:
    with ranks(tmp_path, 3, None, backup=backup.client) as group:
        backup.fill(group)
        for rank in (1, 2):
            group[rank].close()
        group[1] = Rank(tmp_path / "e", 1, 3, None, 1, backup=backup.client)
        enter(group, View(5, (0, 1, 3), (0, 1, 0, 0)))


def test_a_backup_from_a_checkpoint_keeps_experts_as_they_are_served(tmp_path: Path, backup: Backup) -> None:
    """Some layers only, of another type than they are stored in, and with a row for each output."""
    disk, types = str(model.save_checkpoint(tmp_path / "model")), (torch.float64, torch.float32)
    options = BackupOptions("disk", 0, 1 << 30, checkpoint=disk, layers=(0, 2), dtypes=types)
    service = BackupService(backup.registry, Engine(), options, backup.said.append)
    service.start()
    assert service.refresh() == 2 * model.EXPERTS
    stored = model.layout(1).tensors
    served = tuple(
        replace(spec, dtype=dtype, shape=spec.shape[::-1]) for spec, dtype in zip(stored, types, strict=True)
    )
    client = BackupClient(backup.registry, backup.engine, ExpertLayout(2, 3, served), model.EXPERTS)
    into = [torch.zeros(spec.nbytes, dtype=torch.uint8) for spec in served]
    client.reader("disk").read([Want(1, 5, -1, into)])
    for piece, spec, found, dtype in zip(model.pieces(2, 5), stored, into, types, strict=True):
        matrix = piece.view(torch.float32).view(spec.shape)
        assert torch.equal(found.view(dtype).view(spec.shape[::-1]), matrix.t().to(dtype))
    service.stop()


def test_what_changes_is_offered_anew_while_it_is_lacking(tmp_path: Path, backup: Backup) -> None:
    with ranks(tmp_path, 3, None) as group:
        offer = backup.offer(group[0])
        offer.look()
        (before,) = backup.registry.scan(RANK_RECORDS).values()
        held = model.held(group[0].first, 0).copy()
        held[0, 0] = -1
        offer.holds(held, group[0].sums)
        offer.look()
        (after,) = backup.registry.scan(RANK_RECORDS).values()
        assert after != before
        assert len(backup.engine._exposed) == 1
        offer.close()
        assert backup.registry.scan(RANK_RECORDS) == {}


def test_with_two_copies_of_each_expert_any_one_rank_goes_without_a_byte_moved(tmp_path: Path) -> None:
    """Sixteen slots for eight experts. There is no checkpoint, and nothing is read from peers."""
    group = {rank: Rank(tmp_path / "e", rank, 4, None, least_copies=2) for rank in range(RANKS)}
    try:
        epoch = 1
        enter(group, View(epoch, tuple(range(RANKS)), (0,) * RANKS))
        for lost in range(RANKS):
            left = tuple(rank for rank in range(RANKS) if rank != lost)
            epoch += 1
            enter(group, View(epoch, left, (0,) * RANKS))
            routed = group[left[0]].routed
            assert routed is not None
            assert (routed.replica_counts > 0).all(), "what is left serves every expert"
            epoch += 1
            enter(group, View(epoch, tuple(range(RANKS)), (0,) * RANKS))
        assert all(not rank.coverage.brought_in for rank in group.values())
    finally:
        for rank in group.values():
            rank.close()
