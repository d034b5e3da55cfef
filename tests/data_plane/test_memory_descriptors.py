"""Descriptors handed to peers: only to processes of the same user that speak the protocol, and within a time limit."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import eep
from eep.data_plane.memory import descriptor_service
from eep.data_plane.memory.descriptor_service import DescriptorProtocol, DescriptorServer, ask_for_descriptors
from eep.data_plane.memory.shm import SharedMemory

ONE = DescriptorProtocol(b"HELLO-1\n", 4, descriptors=1)
TWO = DescriptorProtocol(b"HELLO-1\n", 4, descriptors=2)
PATIENCE_S = 60.0

Serve = Callable[[DescriptorProtocol, bytes], DescriptorServer]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
def serve(path: str) -> Iterator[Serve]:
    memory, servers = SharedMemory.create("test", 4096), []

    def start(protocol: DescriptorProtocol, answer: bytes = b"okay") -> DescriptorServer:
        servers.append(DescriptorServer(path, protocol, [memory.fd] * protocol.descriptors, lambda: answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
    memory.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def say(path: str, words: bytes) -> tuple[bytes, list[int]]:
    """What a server answers to ``words``, after which nothing more comes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(path)
        connection.sendall(words)
        answer, descriptors, _, _ = socket.recv_fds(connection, 64, 8)
        return answer, descriptors


def test_a_peer_gets_the_answer_and_the_memory(path: str, serve: Serve) -> None:
    serve(TWO, b"okay")
    answer = ask_for_descriptors(path, TWO, "the peer")
    assert answer.content == b"okay"
    assert [os.fstat(each).st_size for each in answer.descriptors] == [4096, 4096]
    assert not any(map(os.get_inheritable, (*answer.descriptors, answer.process)))
    answer.close()


def test_only_the_owner_can_reach_the_socket_and_it_goes_with_the_server(path: str, serve: Serve) -> None:
    server = serve(ONE, b"okay")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    server.close()
    assert not os.path.exists(path)


@pytest.mark.parametrize(("sent", "expected"), [(ONE, TWO), (TWO, ONE)], ids=["too few", "too many"])
def test_an_answer_with_another_number_of_descriptors_is_refused(
    path: str, serve: Serve, sent: DescriptorProtocol, expected: DescriptorProtocol
) -> None:
    before = open_descriptors()
    server = serve(sent, b"okay")
    with pytest.raises(eep.PeerUnreachable, match=rf"descriptors where {expected.descriptors} were due"):
        ask_for_descriptors(path, expected, "the peer")
    server.close()
    assert open_descriptors() == before, "what came is closed"


def test_an_answer_that_ends_early_is_refused(path: str, serve: Serve) -> None:
    serve(ONE, b"ok")
    with pytest.raises(eep.PeerUnreachable, match="the peer broke off: the connection ended early"):
        ask_for_descriptors(path, ONE, "the peer")


def test_a_server_gives_nothing_to_another_user(path: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server, user = serve(ONE, b"okay"), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    try:
        assert say(path, ONE.hello) == (b"", [])
    except (ConnectionResetError, BrokenPipeError):
        pass  # the hello was never read, or not even sent
    server.close()
    assert server.refused == 1


def test_a_peer_takes_nothing_from_another_user(path: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(ONE, b"okay")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(eep.PeerUnreachable, match=f"the socket belongs to another user, {user}"):
        ask_for_descriptors(path, ONE, "the peer")


def test_a_peer_that_speaks_too_slowly_is_refused(path: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for all that it says: a byte now and then does not lengthen it."""

    class Clock:
        """A second passes each time that it is read."""

        now = 0.0

        def monotonic(self) -> float:
            self.now += 1.0
            return self.now

    server = serve(ONE, b"okay")
    monkeypatch.setattr(descriptor_service, "time", Clock())
    assert say(path, ONE.hello[:1]) == (b"", [])
    server.close()
    assert server.refused == 1


def test_a_server_must_have_what_its_protocol_promises(path: str) -> None:
    with pytest.raises(ValueError, match="1 descriptors were given, the protocol has 2"):
        DescriptorServer(path, TWO, [0], lambda: b"okay")
