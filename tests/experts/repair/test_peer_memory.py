"""Expert regions of peers: mapped only if they are what they should be, and alive as long as their process."""

from __future__ import annotations

import errno
import os
import pathlib
import socket
import time
from typing import Any

import pytest
import torch

from eep.data_plane.memory.shm import SharedMemory
from eep.errors import PeerUnreachable
from eep.experts.repair.peer_memory import MappedPeers, copy_all, region_socket, serve_region
from eep.view import View

VIEW = View(1, (0, 1), (0, 0, -1))


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory.create("test", 8192)


def test_a_region_is_seen_by_peers_as_it_changes(tmp_path: pathlib.Path, memory: SharedMemory) -> None:
    server = serve_region(tmp_path, 1, 0, memory)
    peers = MappedPeers(tmp_path, VIEW, 8192)
    assert peers.alive(1)
    memory.bytes_at(0, memory.size)[100] = 42
    assert peers.region(1)[100] == 42
    peers.close()
    server.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("rank", "complaint"), [(2, "not part of epoch 1"), (0, "asked for its experts, does not answer")]
)
def test_who_is_not_there_is_not_alive(tmp_path: pathlib.Path, rank: int, complaint: str) -> None:
    peers = MappedPeers(tmp_path, VIEW, 8192)
    assert not peers.alive(rank)
    with pytest.raises(PeerUnreachable, match=complaint):
        peers.region(rank)


def test_a_region_of_another_size_is_refused(tmp_path: pathlib.Path, memory: SharedMemory) -> None:
    server = serve_region(tmp_path, 1, 0, memory)
    peers = MappedPeers(tmp_path, VIEW, 4096)
    with pytest.raises(PeerUnreachable, match="8192 bytes where 4096 were due"):
        peers.region(1)
    server.close()


def test_who_does_not_say_hello_gets_nothing(tmp_path: pathlib.Path, memory: SharedMemory) -> None:
    server = serve_region(tmp_path, 1, 0, memory)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(region_socket(tmp_path, 1, 0))
        stranger.sendall(b"GIVE-ME-MEMORY")
        answer, descriptors, _, _ = socket.recv_fds(stranger, 64, 1)
        assert (answer, descriptors) == (b"", [])
    server.close()
    assert server.refused == 1


def fail_at_first(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The first accepts fail, as when descriptors have run out."""
    accept, failures = socket.socket.accept, iter(range(times))

    def failing(listening: socket.socket) -> Any:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", failing)


def test_who_has_no_descriptors_left_for_a_moment_answers_afterwards(
    tmp_path: pathlib.Path, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at_first(monkeypatch, 3)
    server = serve_region(tmp_path, 1, 0, memory)
    peers = MappedPeers(tmp_path, VIEW, 8192)
    assert peers.alive(1)
    assert server.refused == 3
    peers.close()
    server.close()
    assert not server._thread.is_alive()


def test_who_has_no_descriptors_left_can_be_closed(
    tmp_path: pathlib.Path, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at_first(monkeypatch, 10**9)
    began = time.monotonic()
    server = serve_region(tmp_path, 1, 0, memory)
    while server.refused < 3 and time.monotonic() < began + 60:
        time.sleep(0.01)
    refused = server.refused
    assert 3 <= refused <= (time.monotonic() - began) / 0.01 + 1, "it waits a little each time"
    server.close()
    assert not server._thread.is_alive()


def test_a_descriptor_that_could_shrink_is_refused(tmp_path: pathlib.Path) -> None:
    loose = SharedMemory.create("loose", 8192)
    os.dup2(os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), loose.fd)
    os.ftruncate(loose.fd, 8192)
    server = serve_region(tmp_path, 1, 0, loose)
    with pytest.raises(PeerUnreachable, match="could still shrink"):
        MappedPeers(tmp_path, VIEW, 8192).region(1)
    server.close()


def test_a_peer_that_answers_nonsense_is_unreachable(tmp_path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as liar:
        liar.bind(region_socket(tmp_path, 1, 0))
        liar.listen(1)
        peers = MappedPeers(tmp_path, VIEW, 8192)
        # No process accepts: the kernel makes the connection, and the answer never comes.
        assert not peers.alive(1)


def test_copies_go_where_they_should() -> None:
    sources = [torch.arange(size, dtype=torch.uint8) for size in (0, 1, 200)]
    targets = [torch.zeros(size, dtype=torch.uint8) for size in (0, 1, 200)]
    copy_all(targets, sources)
    assert all(map(torch.equal, targets, sources))
    strided = torch.zeros(400, dtype=torch.uint8)[::2]
    copy_all([strided], [sources[2]])
    assert torch.equal(strided, sources[2])
    with pytest.raises(ValueError, match="cannot be copied"):
        copy_all([targets[1]], [sources[2]])
    with pytest.raises(ValueError, match="shorter"):
        copy_all(targets, sources[:2])
