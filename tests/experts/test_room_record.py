from __future__ import annotations

from pathlib import Path

from eep.experts.registry.directory_registry import DirectoryRegistry
from eep.experts.room_record import RoomRecord, publish_room, read_rooms
from eep.experts.view_record import HELD_DIRECTORY


def test_what_the_lives_that_are_in_have_given_up_is_read(tmp_path: Path) -> None:
    assert read_rooms(tmp_path, {0: 0}) == {}
    registry = DirectoryRegistry(tmp_path / HELD_DIRECTORY)
    publish_room(registry, 0, 0, RoomRecord(1, 1))
    publish_room(registry, 0, 0, RoomRecord(4096, 16))
    publish_room(registry, 1, 0, RoomRecord(9, 9))
    registry.publish("room/r2.i0", b"{}")
    registry.publish("room/else", b"{}")
    assert read_rooms(tmp_path, {0: 0, 1: 1, 2: 0}) == {0: RoomRecord(4096, 16)}
    registry.close()
