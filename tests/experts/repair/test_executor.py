"""The executor alone, with sources made for the occasion: order, fallback, time limits, refusals."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import eep.experts.repair.executor as repair_module
from eep.errors import EepError
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertMemory
from eep.experts.placement.slot_plan import Placement
from eep.experts.repair.executor import RepairFailed, execute_repair
from eep.experts.repair.reader import Reader, SourceLost, Want
from eep.experts.repair.repair_plan import BackupContents, Origin, RepairPlan, Tier, plan_repair
from eep.experts.repair.repair_sources import LocalReader
from tests.experts import model


class Source(Reader):
    """Delivers what it should, unless told otherwise."""

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.reads: list[list[tuple[int, int]]] = []
        self.release = threading.Event()

    def alive(self) -> bool:
        return self.trouble != "dead"

    def read(self, wants: Sequence[Want]) -> None:
        self.reads.append([(want.layer, want.expert) for want in wants])
        if self.trouble == "stuck":
            assert self.release.wait(60)
        for number, want in enumerate(wants):
            if self.trouble == "breaks off" and number == 1:
                raise SourceLost("broke off")
            for target, source in zip(want.into, model.pieces(want.layer, want.expert), strict=True):
                target.copy_(source)
            if self.trouble == "lies":
                want.into[-1][-1] ^= 1


def empty_rank(**sources: Source) -> tuple[RepairPlan, ExpertMemory, dict[str, Source], Placement]:
    """A rank with nothing in it, to be filled from the named backups, in that order of preference."""
    layout = model.layout(model.EXPERTS)
    memory = ExpertMemory(layout, torch.zeros(layout.region_bytes, dtype=torch.uint8))
    empty = Placement(np.full((model.LAYERS, model.EXPERTS), -1), model.EXPERTS, model.EXPERTS)
    full = Placement(np.tile(np.arange(model.EXPERTS), (model.LAYERS, 1)), model.EXPERTS, model.EXPERTS)
    held = np.ones((model.LAYERS, model.EXPERTS), dtype=bool)
    backups = {name: BackupContents(0, held) for name in sources}
    return plan_repair(empty, full, [0], [0], layout.expert_bytes, backups=backups), memory, sources, full


def run(plan: RepairPlan, memory: ExpertMemory, sources: dict[str, Source], **options: float) -> list[str]:
    return execute_repair(plan, 0, memory, lambda origin: sources[origin.backup], model.checksums(), **options).setbacks


@pytest.mark.parametrize("trouble", ["dead", "breaks off", "lies"])
def test_trouble_with_one_source_is_made_good_by_another(trouble: str) -> None:
    plan, memory, sources, full = empty_rank(bad=Source(trouble), good=Source())
    setbacks = run(plan, memory, sources)
    assert setbacks
    assert all("backup bad" in setback for setback in setbacks)
    assert model.wrong_slots(memory, full, 0) == []


def test_sources_work_at_the_same_time() -> None:
    met = threading.Barrier(3, timeout=60)

    class Meets(Source):
        def read(self, wants: Sequence[Want]) -> None:
            if not self.reads:
                met.wait()
            super().read(wants)

    plan, memory, sources, full = empty_rank(a=Meets(), b=Meets(), c=Meets())
    assert run(plan, memory, sources) == []
    assert model.wrong_slots(memory, full, 0) == []


def test_small_experts_travel_in_batches() -> None:
    plan, memory, sources, _ = empty_rank(a=Source())
    run(plan, memory, sources)
    assert [len(batch) for batch in sources["a"].reads] == [model.LAYERS * model.EXPERTS]


def test_a_source_that_cannot_be_opened_is_passed_over() -> None:
    plan, memory, sources, full = empty_rank(bad=Source(), good=Source())

    def reader_of(origin: Origin) -> Reader:
        if origin.backup == "bad":
            raise SourceLost("no such service")
        return sources[origin.backup]

    assert execute_repair(plan, 0, memory, reader_of, model.checksums()).setbacks
    assert model.wrong_slots(memory, full, 0) == []


def test_a_source_that_is_stuck_ends_the_repair_with_an_error() -> None:
    stuck = Source("stuck")
    plan, memory, sources, _ = empty_rank(stuck=stuck)
    try:
        with pytest.raises(
            RepairFailed, match="backup stuck did not deliver 24 experts before the repair ran out of time"
        ) as caught:
            run(plan, memory, sources, timeout=2.0)
        assert len(caught.value.transfers) == 24
        assert [future.done() for future in caught.value.still_reading] == [False]
    finally:
        stuck.release.set()
    assert not wait(caught.value.still_reading, timeout=60).not_done


def test_who_never_began_to_read_is_not_waited_for() -> None:
    """More sources than threads: those whose turn did not come are not going to write."""
    release, number = threading.Event(), repair_module._MOST_WORKERS + 2
    sources = {f"stuck{index}": Source("stuck") for index in range(number)}
    for source in sources.values():
        source.release = release
    plan, memory, sources, _ = empty_rank(**sources)
    try:
        with pytest.raises(RepairFailed) as caught:
            run(plan, memory, sources, timeout=3.0)
        assert len(caught.value.still_reading) == repair_module._MOST_WORKERS
    finally:
        release.set()
    assert not wait(caught.value.still_reading, timeout=60).not_done


class OnGpu(ExpertMemory):
    """Says that it is on the fourth GPU, and is not."""

    region: Any

    def __init__(self, memory: ExpertMemory) -> None:
        self.layout, self.region, self._memory = memory.layout, SimpleNamespace(device=torch.device("cuda:3")), memory

    def pieces(self, layer: int, slot: int) -> list[torch.Tensor]:
        return self._memory.pieces(layer, slot)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_who_reads_has_the_device_of_the_memory_as_its_own(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    """A thread begins with the first GPU, and a peer's memory is mapped on the GPU of the thread that does it."""
    current: dict[int, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.update({threading.get_ident(): device}))
    read_on: list[torch.device | None] = []

    class Looks(Source):
        def read(self, wants: Sequence[Want]) -> None:
            read_on.append(current.get(threading.get_ident()))
            super().read(wants)

    plan, memory, sources, full = empty_rank(a=Looks())
    run(plan, OnGpu(memory) if on_gpu else memory, sources)
    assert read_on == [torch.device("cuda:3") if on_gpu else None]
    assert model.wrong_slots(memory, full, 0) == []


def test_an_error_of_ours_is_not_taken_for_a_lost_source() -> None:
    plan, memory, _, _ = empty_rank(a=Source(), b=Source())

    def reader_of(origin: Origin) -> Reader:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        execute_repair(plan, 0, memory, reader_of, model.checksums())


def test_experts_without_any_source_are_reported_before_anything_is_written() -> None:
    plan, memory, sources, _ = empty_rank()
    with pytest.raises(RepairFailed, match="no source delivered 24 experts"):
        run(plan, memory, sources)
    assert not memory.region.any()


def test_experts_without_a_checksum_are_refused_before_anything_is_read() -> None:
    plan, memory, sources, _ = empty_rank(a=Source())
    with pytest.raises(ValueError, match="no checksum is known"):
        execute_repair(plan, 0, memory, lambda _: sources["a"], Checksums.none(model.LAYERS, model.EXPERTS))
    assert not sources["a"].reads
    assert not memory.region.any()


def exchanging_rank() -> tuple[RepairPlan, ExpertMemory, Placement, Placement]:
    """A rank whose two slots exchange their experts; there is no other copy of them."""
    layout = model.layout(2)
    memory = ExpertMemory(layout, torch.zeros(layout.region_bytes, dtype=torch.uint8))
    before = Placement(np.tile([0, 1], (model.LAYERS, 1)), model.EXPERTS, 2)
    after = Placement(np.tile([1, 0], (model.LAYERS, 1)), model.EXPERTS, 2)
    model.load(memory, before, 0)
    return plan_repair(before, after, [0], [0], layout.expert_bytes), memory, before, after


def test_staging_is_enough_for_slots_that_exchange_their_experts() -> None:
    plan, memory, _, after = exchanging_rank()
    assert all(transfer.staged for transfer in plan.transfers)
    report = execute_repair(plan, 0, memory, lambda _: LocalReader(memory), model.checksums())
    assert set(report.bytes_by_tier) == {Tier.LOCAL}
    assert model.wrong_slots(memory, after, 0) == []


@pytest.mark.parametrize("trouble", ["dead", "breaks off", "lies"])
def test_staging_that_fails_leaves_every_slot_as_it_was(trouble: str) -> None:
    plan, memory, before, _ = exchanging_rank()
    with pytest.raises(RepairFailed, match="no source delivered"):
        execute_repair(plan, 0, memory, lambda _: Source(trouble), model.checksums())
    assert model.wrong_slots(memory, before, 0) == []


def test_copies_that_differ_are_found_when_checksums_meet() -> None:
    layout = model.layout(8)
    placement = Placement(np.tile(np.r_[np.arange(8), np.arange(8)], (model.LAYERS, 1)), 8, 8)
    memories = []
    for rank in range(2):
        memories.append(ExpertMemory(layout, torch.zeros(layout.region_bytes, dtype=torch.uint8)))
        model.load(memories[rank], placement, rank)
    parts = [Checksums.of_rank(memory, placement, rank) for rank, memory in enumerate(memories)]
    assert (Checksums.merged(parts).values == model.checksums().values).all()
    memories[1].pieces(2, 3)[0][5] ^= 4
    parts[1] = Checksums.of_rank(memories[1], placement, 1)
    with pytest.raises(EepError, match="two copies of expert 3 in layer 2 differ"):
        Checksums.merged(parts)
