"""What the holder of memory does with requests, right and wrong."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eep.anchor.anchor import SOCKET, Anchor, HeldMemory, list_held
from eep.anchor.memory_holder import MAX_PACKET, MemoryHolder
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError

SIZE = 4096


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    holder, (told, ends) = MemoryHolder(str(tmp_path / SOCKET)), os.pipe()
    thread = threading.Thread(target=holder.wait, args=(told,), daemon=True)
    thread.start()
    yield tmp_path
    os.write(ends, b"x")
    thread.join(10)
    assert not thread.is_alive()


def ask(directory: Path, packet: bytes, *descriptors: int) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(directory / SOCKET))
        socket.send_fds(connection, [packet], list(descriptors))
        answer, received, _, _ = socket.recv_fds(connection, MAX_PACKET, 1)
        for each in received:
            os.close(each)
        told: dict[str, Any] = json.loads(answer)
        return told


def request(what: str, **changes: Any) -> bytes:
    return json.dumps({"do": what, "rank": 1, "name": "kv", "incarnation": 3, "size": SIZE, **changes}).encode()


def test_memory_is_held_and_found(directory: Path) -> None:
    memory = SharedMemory.create("test", SIZE)
    assert ask(directory, request("hold"), memory.fd) == {"ok": True}
    assert list_held(directory) == [HeldMemory(1, "kv", 3, SIZE)]
    memory.bytes_at(0, SIZE)[5] = 42
    memory.close()
    reader = Anchor(directory, 2, 0)
    found = reader.find(1, "kv")
    assert found is not None
    assert found[0] == HeldMemory(1, "kv", 3, SIZE)
    assert SharedMemory.adopt(found[1], SIZE).bytes_at(0, SIZE)[5] == 42
    assert reader.find(1, "weights") is None
    reader.close()


@pytest.mark.parametrize(
    ("packet", "has_descriptor", "why"),
    [
        (b"{", True, "Expecting"),
        (b"[]", False, "list indices"),
        (request("burn"), False, "there is no request 'burn'"),
        (request("hold"), False, "send its descriptor along"),
        (request("hold", size=0), True, "a size is positive"),
        (request("hold", name="x" * 65), True, "at most 64 characters"),
        (request("hold", incarnation=-1), True, "a life is not negative"),
        (request("hold", rank="one"), True, "invalid literal"),
        (request("find"), False, "nothing is held as kv for rank 1"),
    ],
)
def test_a_request_that_makes_no_sense_changes_nothing(
    directory: Path, packet: bytes, has_descriptor: bool, why: str
) -> None:
    memory = SharedMemory.create("test", SIZE)
    answer = ask(directory, packet, *([memory.fd] if has_descriptor else []))
    assert not answer["ok"]
    assert why in answer["why"]
    assert list_held(directory) == []
    memory.close()


def test_an_earlier_life_takes_nothing_from_a_later_one(directory: Path) -> None:
    memory = SharedMemory.create("test", SIZE)
    assert ask(directory, request("hold", incarnation=5), memory.fd)["ok"]
    answer = ask(directory, request("hold", incarnation=4), memory.fd)
    assert "later life" in answer["why"]
    assert [held.incarnation for held in list_held(directory)] == [5]
    assert ask(directory, request("hold", incarnation=6), memory.fd)["ok"]
    assert [held.incarnation for held in list_held(directory)] == [6]
    memory.close()


def test_a_peer_that_says_nothing_keeps_no_other_waiting(directory: Path) -> None:
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
    for each in silent:
        each.connect(str(directory / SOCKET))
    assert list_held(directory) == []
    for each in silent:
        each.close()
    assert list_held(directory) == []


def test_a_new_life_with_another_size_has_new_memory(directory: Path) -> None:
    first, second = Anchor(directory, 1, 0), Anchor(directory, 1, 1)
    assert first.attach("kv", SIZE, SharedMemory)[1] is None
    assert second.attach("kv", 2 * SIZE, SharedMemory)[1] is None
    assert list_held(directory) == [HeldMemory(1, "kv", 1, 2 * SIZE)]
    with pytest.raises(EepError, match="later life"):
        first._hold("kv", first._held["kv"])
    first.close()
    second.close()


def test_it_answers_also_when_it_holds_more_than_select_can_wait_for(directory: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert ask(directory, request("list")) == {"ok": True, "held": []}
        assert ask(directory, request("list")) == {"ok": True, "held": []}
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
