"""A transfer engine hears connections to its own address, and to no other of this host."""

from __future__ import annotations

import os
import socket
from collections.abc import Container

import pytest

from eep.experts.backup import port_filter

ANYTHING = b"hello"


@pytest.mark.parametrize(
    ("family", "anywhere", "named", "other"),
    [
        (socket.AF_INET, "0.0.0.0", "127.0.0.1", "127.0.0.2"),
        (socket.AF_INET6, "::", "127.0.0.1", "127.0.0.2"),
        (socket.AF_INET6, "::", "127.0.0.1", "::1"),
        (socket.AF_INET6, "::", "::1", "127.0.0.1"),
    ],
)
def test_only_the_named_address_is_heard(family: socket.AddressFamily, anywhere: str, named: str, other: str) -> None:
    before = port_filter.open_sockets()
    with socket.create_server((anywhere, 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:
        assert port_filter.filter_new_listeners(before, named) == 1
        port = listener.getsockname()[1]
        with socket.create_connection((named, port), timeout=20) as client, listener.accept()[0] as accepted:
            accepted.sendall(ANYTHING)
            assert client.recv(100) == ANYTHING
        with pytest.raises(TimeoutError):
            socket.create_connection((other, port), timeout=0.3)


def test_sockets_that_were_there_and_those_of_one_address_are_left_alone() -> None:
    with socket.create_server(("0.0.0.0", 0)) as earlier:
        before = port_filter.open_sockets()
        with socket.create_server(("127.0.0.2", 0)) as own:
            assert port_filter.filter_new_listeners(before, "127.0.0.1") == 0
            for server, address in ((earlier, "127.0.0.2"), (own, "127.0.0.2")):
                socket.create_connection((address, server.getsockname()[1]), timeout=20).close()


def test_an_engine_hears_its_own_address_only() -> None:
    pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine (pip install 'eep[backup]')")
    from eep.experts.backup.transfer_engine import Engine

    before = port_filter.open_sockets()
    engine = Engine("127.0.0.1")
    ports = listening(before)
    assert int(engine.session.rpartition(":")[2]) in ports
    assert len(ports) == 2, "one for what engines tell each other, and one for bytes"
    for port in ports:
        socket.create_connection(("127.0.0.1", port), timeout=20).close()
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.2", port), timeout=0.3)


def listening(before: Container[str]) -> set[int]:
    """The ports of sockets that listen, and were not there before."""
    found = set()
    for name, descriptor in port_filter.open_sockets().items():
        if name not in before:
            with socket.socket(fileno=os.dup(descriptor)) as each:
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(each.getsockname()[1])
    return found
