"""Memory shared by descriptor."""

from __future__ import annotations

import ctypes
import gc
import os

import pytest
import torch

import eep
from eep.data_plane.memory.shm import SharedMemory


def test_both_mappings_show_the_same_bytes() -> None:
    ours = SharedMemory.create("test", 8192)
    theirs = SharedMemory.adopt(os.dup(ours.fd), 8192)
    ours.map[100:104] = b"abcd"
    assert theirs.map[100:104] == b"abcd"
    assert ctypes.string_at(theirs.address + 100, 4) == b"abcd"
    ours.close()
    assert theirs.map[100:104] == b"abcd"  # a mapping outlives the maker's
    theirs.close()
    theirs.close()


def test_its_size_cannot_be_changed() -> None:
    memory = SharedMemory.create("test", 4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.close()


def test_what_a_peer_could_pull_away_is_not_mapped(tmp_path: os.PathLike[str]) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(eep.PeerUnreachable, match="not sealed"):
        SharedMemory.adopt(fd, 4096)
    with pytest.raises(eep.PeerUnreachable, match="4096 bytes where 8192 were due"):
        SharedMemory.adopt(os.dup(SharedMemory.create("short", 4096).fd), 8192)
    path = os.path.join(tmp_path, "file")
    with open(path, "wb") as file:
        file.truncate(4096)
    with pytest.raises(eep.PeerUnreachable, match="not sealed memory"):
        SharedMemory.adopt(os.open(path, os.O_RDWR), 4096)


def test_a_tensor_keeps_the_mapping_alive() -> None:
    memory = SharedMemory.create("eep-test-kept", 4096)
    tensor = torch.frombuffer(memory.map, dtype=torch.uint8)
    tensor.fill_(7)
    memory.close()
    del memory
    gc.collect()
    assert int(tensor.sum()) == 7 * 4096
    del tensor
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert "eep-test-kept" not in maps.read()


def test_a_placeholder_becomes_other_memory_where_it_is() -> None:
    place, memory = SharedMemory.placeholder(8192), SharedMemory.create("test", 8192)
    shown = place.bytes_at(4096, 8)
    shown.fill_(9)
    memory.bytes_at(4096, 8).fill_(5)
    address, descriptor = shown.data_ptr(), os.dup(memory.fd)
    place.become(memory)
    assert shown.data_ptr() == address
    assert shown.tolist() == [5] * 8, "what was written to the placeholder is lost"
    shown.fill_(7)
    another = SharedMemory.adopt(descriptor, 8192)
    assert another.bytes_at(4096, 8).tolist() == [7] * 8
    with pytest.raises(ValueError, match="cannot take the place"):
        place.become(another)
    another.close()
    place.close()
    assert shown.tolist() == [7] * 8, "a tensor keeps the mapping alive"


def test_a_placeholder_takes_only_memory_of_its_size() -> None:
    place, memory = SharedMemory.placeholder(8192), SharedMemory.create("test", 4096)
    with pytest.raises(ValueError, match="memory of 4096 bytes"):
        place.become(memory)
    place.close()
    memory.close()
