"""Ranks that are left get memory for more slots, and give it back when others join."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eep.data_plane.memory.parted import NONE, PartedKind
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError
from eep.experts.coverage import LACKING
from eep.experts.layout import ExpertLayout, ExpertMemory, TensorSpec
from eep.experts.placement.packing import EMPTY
from eep.experts.slot_room import SlotRoom, loose_ranges
from eep.view import View
from tests.experts import model
from tests.experts.covered import RANKS, Rank, enter
from tests.host_driver import UNIT, HostDriver

USUAL, MOST = 2, model.EXPERTS
WHOLE = View(1, (0, 1, 2, 3), (0,) * RANKS)
EXPERT_BYTES = model.layout(1).expert_bytes


class Group:
    """Ranks with two slots each for eight experts, and addresses for eight."""

    def __init__(self, path: Path, parted: bool = False) -> None:
        self.parted = parted
        self.path, self.disk = path / "e", model.save_checkpoint(path / "model")
        self.taken: dict[int, int] = {}
        self.limit = 1 << 40
        self.ranks = {rank: self.make(rank) for rank in range(RANKS)}

    def make(self, rank: int, life: int = 0, last: Rank | None = None) -> Rank:
        def take(size: int) -> None:
            if size > self.limit:
                raise EepError("the cache cannot do without")
            self.taken[rank] = size

        return Rank(self.path, rank, USUAL, self.disk, life, last=last, most=MOST, take=take, parted=self.parted)

    def lose(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].close()

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    enter(made.ranks, WHOLE)
    yield made
    made.close()


def test_fewer_ranks_make_more_room_and_give_it_back(group: Group) -> None:
    assert group.taken == {}
    per_slot = model.LAYERS * EXPERT_BYTES
    view = WHOLE
    for lost, slots in ((1, 3), (2, 4), (3, 8)):
        group.lose(lost)
        view = view.without([lost])
        enter(group.ranks, view)
        assert group.taken[0] == (slots - USUAL) * per_slot
    for back in (1, 2, 3):
        group.ranks[back] = group.make(back, life=1)
        view = view.joined_by({back: 1})
        enter(group.ranks, view)
        for rank in view.active:
            group.ranks[rank].coverage.close_slots()
            group.ranks[rank].check()
    assert group.taken[0] == 0
    assert group.ranks[0].shown is not None
    assert group.ranks[0].shown.digest == group.ranks[0].first.digest
    assert (group.ranks[0].coverage._slots.table[:, USUAL:] == EMPTY).all(), "what has no memory holds nothing"


def test_peers_do_not_read_slots_whose_memory_is_not_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    HostDriver(units=1000).install(monkeypatch)
    caplog.set_level("INFO")
    group = Group(tmp_path, parted=True)
    enter(group.ranks, WHOLE)
    group.lose(1, 2, 3)
    alone = WHOLE.without([1, 2, 3])
    enter(group.ranks, alone)
    group.ranks[0].check()
    group.ranks[1] = group.make(1, life=1)
    enter(group.ranks, alone.joined_by({1: 1}))
    for rank in (0, 1):
        group.ranks[rank].check()
    group.close()
    assert "experts brought in" in caplog.text
    assert "wrong checksum" not in caplog.text


def test_a_rank_whose_memory_cannot_be_had_waits_for_others(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    group.limit = 2 * model.LAYERS * EXPERT_BYTES
    group.lose(1, 2, 3)
    alone = WHOLE.without([1, 2, 3])
    assert group.ranks[0].coverage.repair(alone) == LACKING
    assert "the cache cannot do without" in caplog.text
    assert group.ranks[0].shown is not None
    assert group.ranks[0].shown.digest == group.ranks[0].first.digest, "nothing has changed"
    group.ranks[1] = group.make(1, life=1)
    enter(group.ranks, alone.joined_by({1: 1}))


def test_the_next_life_finds_the_slots_that_the_last_one_had_open(group: Group) -> None:
    """They hold what they held. Their memory is given up when they are not needed."""
    group.lose(1, 2)
    two = WHOLE.without([1, 2])
    enter(group.ranks, two)
    last = group.ranks.pop(3)
    last.coverage.close()
    group.ranks[3] = group.make(3, life=1, last=last)
    assert group.ranks[3].room is not None
    assert group.ranks[3].room.slots == 4
    again = two.without([3]).joined_by({3: 1})
    del group.taken[3]
    enter(group.ranks, again)
    assert group.taken[3] == 2 * model.LAYERS * EXPERT_BYTES
    assert not group.ranks[3].coverage.brought_in, "nothing had to be brought in"
    for rank in (1, 2):
        group.ranks[rank] = group.make(rank, life=1)
    enter(group.ranks, again.joined_by({1: 1, 2: 1}))
    group.ranks[3].coverage.close_slots()
    assert group.ranks[3].room.slots == USUAL
    assert group.taken[3] == 0


def test_slots_that_are_not_open_take_no_memory() -> None:
    layout = ExpertLayout(2, 8, (TensorSpec("w", (mmap.PAGESIZE,), torch.uint8),))
    shared, taken = SharedMemory.create("experts", layout.region_bytes), [0]
    region = shared.bytes_at(0, layout.region_bytes)
    room = SlotRoom(layout, shared, 2, lambda size: taken.append(size))
    memory = ExpertMemory(layout, region)

    def pages() -> int:
        return os.fstat(shared.fd).st_blocks * 512 // mmap.PAGESIZE

    def write(slots: int) -> None:
        for layer in range(2):
            memory.tensors(layer)["w"][:slots] = 1

    write(2)
    assert pages() == 4
    room.open(5)
    write(5)
    assert (pages(), taken[-1]) == (10, 3 * 2 * mmap.PAGESIZE)
    room.close(3)
    assert (pages(), taken[-1]) == (6, 2 * mmap.PAGESIZE)
    room.close(0)
    assert (pages(), taken[-1], room.slots) == (4, 0, 2)
    assert all(bool((memory.tensors(layer)["w"][:2] == 1).all()) for layer in range(2))
    shared.close()


def test_room_in_parts_is_asked_for_as_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the manner of a GPU: some slots at a time, and the others keep what they hold."""
    HostDriver(units=1000).install(monkeypatch)
    specs = (TensorSpec("w", (3 * UNIT // 2,), torch.uint8), TensorSpec("s", (16,), torch.uint8))
    layout = ExpertLayout(3, 14, specs)
    shared = PartedKind(tuple(loose_ranges(layout, USUAL)), backed=False).create("experts", layout.region_bytes)
    taken, memory = [0], ExpertMemory(layout, shared.bytes_at(0, layout.region_bytes))

    def backed() -> int:
        found = zip(shared.parts, shared.descriptors, strict=True)
        return sum(part.size for part, each in found if part.is_loose and each != NONE)

    room = SlotRoom(layout, shared, USUAL, lambda size: taken.append(size))
    for layer in range(3):
        memory.tensors(layer)["w"][:USUAL] = 1 + layer
    assert backed() == 0
    for slots in (3, 7, 14):
        before = backed()
        room.open(slots)
        assert taken[-1] == backed() > before
        for layer in range(3):
            memory.tensors(layer)["w"][:slots] = 1 + layer
            memory.tensors(layer)["s"][:slots] = 5
        for layer in range(3):
            assert bool((memory.tensors(layer)["w"][:slots] == 1 + layer).all())
            assert bool((memory.tensors(layer)["s"][:slots] == 5).all())
    for slots in (7, 3, 0):
        before = backed()
        room.close(slots)
        kept = max(slots, USUAL)
        assert backed() <= taken[-1] <= before
        for layer in range(3):
            assert bool((memory.tensors(layer)["w"][:kept] == 1 + layer).all())
            assert bool((memory.tensors(layer)["s"][:kept] == 5).all())
    assert (backed(), taken[-1]) == (0, 0)
    shared.close()
