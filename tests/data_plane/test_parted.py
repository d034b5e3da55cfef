"""Memory of which parts can be given up, and had again."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from eep.data_plane.memory import adopt, count_descriptors, descriptors_of
from eep.data_plane.memory.parted import NONE, Part, PartedKind, cut
from eep.data_plane.memory.vmm import DeviceMemory
from eep.errors import EepError, PeerUnreachable
from tests.host_driver import UNIT, HostDriver

SIZE = 10 * UNIT
KIND = PartedKind(((3 * UNIT, 2 * UNIT), (5 * UNIT, 2 * UNIT)))
"""The third to the seventh unit, in two parts."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    made = HostDriver(units=100)
    made.install(monkeypatch)
    return made


@given(
    unit=some.integers(1, 8),
    lengths=some.lists(some.tuples(some.integers(0, 20), some.integers(1, 30)), max_size=6),
    rest=some.integers(0, 20),
)
def test_parts_cover_everything_and_are_loose_only_inside(unit: int, lengths: list[tuple[int, int]], rest: int) -> None:
    loose, at = [], 0
    for gap, length in lengths:
        loose.append((at + gap, length))
        at += gap + length
    parts = cut(at + rest + 1, loose, unit)
    assert parts[0].start == 0
    assert 0 <= parts[-1].end - (at + rest + 1) < unit
    assert all(first.end == second.start for first, second in pairwise(parts))
    assert all(part.size > 0 and part.size % unit == 0 for part in parts)
    bytes_loose = {byte for offset, length in loose for byte in range(offset, offset + length)}
    for part in parts:
        if part.is_loose:
            assert set(range(part.start, part.end)) <= bytes_loose
    covered = {byte for part in parts if part.is_loose for byte in range(part.start, part.end)}
    inside = [
        number
        for number in range(parts[-1].end // unit)
        if set(range(number * unit, (number + 1) * unit)) <= bytes_loose
    ]
    assert covered == {byte for number in inside for byte in range(number * unit, (number + 1) * unit)}


def test_a_unit_between_two_ranges_belongs_to_the_first() -> None:
    assert cut(40, [(8, 10), (18, 14)], 4) == (
        Part(0, 8, False),
        Part(8, 12, True),
        Part(20, 12, True),
        Part(32, 8, False),
    )


def test_what_is_given_up_is_lost_and_all_else_stays(driver: HostDriver) -> None:
    memory = KIND.create("test", SIZE)
    shown = memory.bytes_at(0, SIZE)
    shown.fill_(7)
    memory.give_up(5 * UNIT, 2 * UNIT)
    assert [each == NONE for each in memory.descriptors] == [False, False, True, False]
    assert bool((shown[: 5 * UNIT] == 7).all())
    assert bool((shown[7 * UNIT :] == 7).all())
    shown[5 * UNIT : 7 * UNIT] = 9  # into the void
    memory.back(5 * UNIT, UNIT)
    assert not shown[5 * UNIT : 7 * UNIT].any(), "new memory, of the whole part"
    assert NONE not in memory.descriptors
    memory.give_up(4 * UNIT, 6 * UNIT)
    assert [each == NONE for each in memory.descriptors] == [False, False, True, False], "the first part reaches out"
    assert memory.gain_of(0, SIZE) == 4 * UNIT
    assert (memory.gain_of(0, 6 * UNIT), memory.cost_of(0, 6 * UNIT)) == (2 * UNIT, 4 * UNIT)
    memory.close()


def test_memory_that_there_is_not_leaves_everything_as_it_was(driver: HostDriver) -> None:
    memory = PartedKind(KIND.loose, backed=False).create("test", SIZE)
    before = list(memory.descriptors)
    driver.left = 3
    with pytest.raises(EepError, match="out of memory"):
        memory.back(3 * UNIT, 4 * UNIT)
    assert memory.descriptors == before
    memory.bytes_at(0, SIZE).fill_(1)  # all addresses can be used
    memory.close()


def test_a_placeholder_becomes_what_another_had(driver: HostDriver) -> None:
    memory, place = KIND.create("test", SIZE), KIND.placeholder(SIZE)
    shown = place.bytes_at(0, SIZE)
    memory.bytes_at(0, SIZE).fill_(3)
    memory.give_up(5 * UNIT, 2 * UNIT)
    place.become(memory)
    assert bool((shown[: 5 * UNIT] == 3).all())
    assert bool((shown[7 * UNIT :] == 3).all())
    assert place.descriptors[2] == NONE
    with pytest.raises(ValueError, match="cannot take the place"):
        place.become(KIND.create("test", SIZE))
    place.close()


def test_a_placeholder_of_one_piece_outlives_what_filled_it(driver: HostDriver) -> None:
    place = DeviceMemory.placeholder(3 * UNIT)
    place.bytes_at(0, 3 * UNIT).fill_(4)
    memory = DeviceMemory.create("test", 3 * UNIT)
    memory.bytes_at(0, 3 * UNIT).fill_(7)
    shown = place.bytes_at(0, 3 * UNIT)
    place.become(memory)
    assert shown.tolist() == [7] * 3 * UNIT
    place.close()


def test_a_peer_maps_what_lasts(driver: HostDriver) -> None:
    memory = KIND.create("test", SIZE)
    memory.bytes_at(0, SIZE).fill_(5)
    sent = [os.dup(each) for each in descriptors_of(memory)]
    assert len(sent) == count_descriptors(KIND, SIZE) == 2
    theirs = adopt(KIND, sent, SIZE)
    seen = theirs.bytes_at(0, SIZE)
    assert bool((seen[: 3 * UNIT] == 5).all())
    assert bool((seen[7 * UNIT :] == 5).all())
    seen[0] = 6
    assert int(memory.bytes_at(0, 1)[0]) == 6
    theirs.close()
    memory.close()


def test_too_few_parts_are_refused_and_closed(driver: HostDriver, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(PeerUnreachable, match="1 parts of memory where 4 were due"):
        KIND.adopt_parts([descriptor], SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
