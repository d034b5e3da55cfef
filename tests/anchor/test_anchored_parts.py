"""Memory that is held in parts: what was given up is let go by the keeper, too, and the rest is there for the next life."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.anchor.anchor import SOCKET, Anchor, list_held
from eep.anchor.memory_holder import MemoryHolder
from eep.data_plane.memory.parted import NONE, PartedKind, PartedMemory
from tests.host_driver import UNIT, HostDriver

SIZE = 10 * UNIT
LOOSE = ((5 * UNIT, 2 * UNIT), (8 * UNIT, UNIT))
KIND = PartedKind(LOOSE)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    HostDriver(units=1000).install(monkeypatch)
    holder = MemoryHolder(str(tmp_path / SOCKET))
    ended, end = os.pipe()
    thread = threading.Thread(target=holder.wait, args=(ended,))
    thread.start()
    yield tmp_path
    os.write(end, b"x")
    thread.join(5)
    for each in (ended, end):
        os.close(each)


def held_parts(directory: Path) -> list[str]:
    return sorted(each.name for each in list_held(directory))


def attached(directory: Path, life: int, kind: PartedKind = KIND) -> tuple[Anchor, PartedMemory, int | None]:
    anchor = Anchor(directory, 1, life)
    memory, before = anchor.attach("kv", SIZE, kind)
    assert isinstance(memory, PartedMemory)
    return anchor, memory, before


def test_the_next_life_has_the_parts_that_the_last_one_had(directory: Path) -> None:
    first, memory, before = attached(directory, 0)
    assert before is None
    assert held_parts(directory) == [f"kv.{number}" for number in range(5)]
    memory.bytes_at(0, SIZE).fill_(4)
    memory.give_up(5 * UNIT, 2 * UNIT)
    first.hold("kv", memory)
    assert held_parts(directory) == ["kv.0", "kv.2", "kv.3", "kv.4"]
    second, later, before = attached(directory, 3)
    assert before == 0
    assert [each == NONE for each in later.descriptors] == [False, True, False, False, False]
    assert bool((later.bytes_at(0, 5 * UNIT) == 4).all())
    assert bool((later.bytes_at(7 * UNIT, 3 * UNIT) == 4).all())
    later.back(5 * UNIT, UNIT)
    second.hold("kv", later)
    assert {each.incarnation for each in list_held(directory)} == {3}
    assert held_parts(directory) == [f"kv.{number}" for number in range(5)]
    for each in (first, second):
        each.close()


def test_a_spare_takes_the_parts_for_its_placeholder(directory: Path) -> None:
    first, memory, _ = attached(directory, 0)
    memory.bytes_at(0, SIZE).fill_(4)
    spare, place = Anchor(directory, 1), KIND.placeholder(SIZE)
    shown = place.bytes_at(0, SIZE)
    spare.attach("kv", SIZE, KIND, place)
    assert bool((shown == 4).all())
    assert {each.incarnation for each in list_held(directory)} == {0}, "it holds nothing before it begins"
    spare.begin(2)
    assert {each.incarnation for each in list_held(directory)} == {2}
    for each in (first, spare):
        each.close()


def test_what_ends_with_the_process_is_not_held(directory: Path) -> None:
    kind = PartedKind(LOOSE, backed=False)
    first, memory, _ = attached(directory, 0, kind)
    memory.back(0, SIZE)
    first.hold("kv", memory)
    assert held_parts(directory) == ["kv.0", "kv.2", "kv.4"]
    second, later, before = attached(directory, 1, kind)
    assert before == 0
    assert [each == NONE for each in later.descriptors] == [False, True, False, True, False]
    for each in (first, second):
        each.close()


def test_without_all_lasting_parts_memory_is_new(directory: Path) -> None:
    first, memory, _ = attached(directory, 0)
    memory.bytes_at(0, SIZE).fill_(4)
    first.close()
    another = PartedKind(((4 * UNIT, 2 * UNIT),))
    _, later, before = attached(directory, 1, another)
    assert before is None
    assert not later.bytes_at(0, SIZE).any()
    assert held_parts(directory) == ["kv.0", "kv.1", "kv.2"], "nothing of the old one"
