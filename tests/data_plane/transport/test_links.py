"""Links between two hosts in network namespaces: nothing is shown early, nothing is written where it may not be, and
every call ends, whatever becomes of the peer."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest

from bench.common import network_namespaces
from eep.abi import native
from eep.abi.hosts import TOKEN_BYTES, LinkOffer, LinkSecret
from eep.abi.link import NativeTransport
from eep.errors import EepError
from tests.data_plane.transport.link_program import END_S, UNTOUCHED, LinkProgram
from tests.data_plane.transport.requirements import why_no_links
from tests.ranks import CommandedProcess

AREAS, SIZE = 3, 60_000
LINK = "link"
SMALL = [(0, 0, 100), (1, 50, 1), (2, SIZE - 10, 10)]

_reason = why_no_links() or network_namespaces.why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


CONNECTED, COUNTING = "tcp", "tcp;ofi_rxm"
"""A provider with connections, and one without, for which the receiver counts."""
any_provider = pytest.mark.parametrize("provider", [CONNECTED, COUNTING])


class LinkedHosts:
    """A process on each of two hosts, and links between them; killed, whatever happens, at the end."""

    def __init__(self, provider: str) -> None:
        self.provider = provider
        self.network = network_namespaces.Network(2)
        self.processes: list[CommandedProcess] = []

    def start(self, host: int) -> CommandedProcess:
        arguments = (self.network.namespace(host), self.network.address(host), self.provider)
        process = CommandedProcess(f"host {host}", LinkProgram, arguments)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self.network.close()


@pytest.fixture
def provider() -> str:
    return CONNECTED


@pytest.fixture
def hosts(provider: str) -> Iterator[LinkedHosts]:
    hosts = LinkedHosts(provider)
    yield hosts
    hosts.close()


def link(left: CommandedProcess, right: CommandedProcess, name: str = LINK) -> None:
    offers = [end.call("open", name, AREAS, SIZE) for end in (left, right)]
    left.call("connect", name, *offers[1])
    right.call("connect", name, *offers[0])


def pass_message(sender: CommandedProcess, receiver: CommandedProcess, number: int, name: str = LINK) -> None:
    """A message that arrives whole."""
    receiver.send("receive", name)
    assert sender.call("send", name, number, SMALL) == ""
    assert receiver.answer() == (number, 0, 0, 0, 0, 0)
    for area, offset, size in SMALL:
        assert receiver.call("area", name, area, offset, size) == {number}


@any_provider
def test_a_signal_never_comes_before_what_it_stands_for(hosts: LinkedHosts) -> None:
    left, right = hosts.start(0), hosts.start(1)
    link(left, right)
    dice = random.Random(27)
    sizes = [1, 8, 100, 4096, SIZE]
    puts = [(area, 0, size) for area, size in enumerate(dice.sample(sizes, AREAS - 1))] + [(AREAS - 1, 0, SIZE)]
    right.send("verify", LINK, 60, puts)
    assert left.call("stream", LINK, 60, puts) == 60
    assert right.answer() == 0
    assert right.call("guards", LINK) == {UNTOUCHED}
    assert left.call("refused", LINK) == right.call("refused", LINK) == 0


def test_a_killed_peer_is_noticed(hosts: LinkedHosts) -> None:
    left, right = hosts.start(0), hosts.start(1)
    link(left, right)
    pass_message(left, right, 1)
    right.kill()
    assert "broken" in left.call("pump", LINK, 20.0)
    assert "broken" in left.call("send", LINK, 2, SMALL)


def test_an_address_that_nobody_listens_at_ends_in_an_error(hosts: LinkedHosts) -> None:
    left, right = hosts.start(0), hosts.start(1)
    offers = [end.call("open", LINK, AREAS, SIZE) for end in (left, right)]
    right.kill()
    left.call("connect", LINK, *offers[1])
    # Of the two ends, one connects and the other waits: which, is for the dice.
    if offers[0][1][:TOKEN_BYTES] < offers[1][1][:TOKEN_BYTES]:
        assert "Connection refused" in left.call("pump", LINK, END_S)
    else:
        assert left.call("pump", LINK, 1.0) == ""


@any_provider
def test_a_peer_that_stands_still_blocks_no_call(hosts: LinkedHosts) -> None:
    left, right = hosts.start(0), hosts.start(1)
    link(left, right)
    pass_message(left, right, 1)
    right.stop()
    right.wait_until_stopped()
    assert left.call("put_without_waiting", LINK, 0, SIZE, 10_000) < 10_000
    assert not left.call("drain", LINK, 0.2)
    right.resume()
    right.send("pump", LINK, END_S)  # it ends with the test
    assert left.call("drain", LINK, END_S)


@any_provider
def test_another_life_of_a_peer_gets_a_link_of_its_own(hosts: LinkedHosts) -> None:
    left, first = hosts.start(0), hosts.start(1)
    link(left, first)
    pass_message(first, left, 1)
    first.kill()
    left.call("close", LINK)
    second = hosts.start(1)
    link(left, second)
    pass_message(second, left, 2)
    pass_message(left, second, 3)


@any_provider
def test_a_life_that_was_shut_out_writes_nothing(hosts: LinkedHosts) -> None:
    left, zombie = hosts.start(0), hosts.start(1)
    link(left, zombie)
    pass_message(zombie, left, 1)
    zombie.stop()
    zombie.wait_until_stopped()
    left.call("close", LINK)
    second = hosts.start(1)
    link(left, second)
    pass_message(second, left, 2)
    zombie.resume()
    left.send("pump", LINK, 3.0)
    zombie.call("send", LINK, 9, SMALL, 2.0)
    zombie.call("send", LINK, 9, SMALL, 0.5)
    assert left.answer() == ""
    assert left.call("receive", LINK, 0.2) is None
    assert left.call("area", LINK, *SMALL[0]) == {2}
    pass_message(second, left, 3)


@any_provider
@pytest.mark.parametrize("lie", ["longer", "key", "below"])
def test_a_peer_reaches_nothing_but_its_areas(hosts: LinkedHosts, lie: str) -> None:
    left, right = hosts.start(0), hosts.start(1)
    link(left, right, "other")
    pass_message(right, left, 1, "other")
    (offer, secret), (theirs, their_secret) = (end.call("open", LINK, AREAS, SIZE) for end in (left, right))
    doctored, keys = LinkOffer.from_buffer_copy(offer), LinkSecret.from_buffer_copy(secret)
    puts = [(0, 0, 100)]
    if lie == "longer":
        doctored.bytes[0], puts = SIZE + 4096, [(0, SIZE - 50, 100)]
    elif lie == "below":
        doctored.base[0] = (doctored.base[0] - 50) % 2**64
    else:
        keys.keys[0] ^= 1
    left.call("connect", LINK, theirs, their_secret)
    right.call("connect", LINK, bytes(doctored), bytes(keys))
    left.send("pump", LINK, 1.5)
    right.call("send", LINK, 77, puts, 1.0)
    left.answer()
    assert left.call("receive", LINK, 0.2) is None
    assert left.call("guards", LINK) == {UNTOUCHED}
    assert left.call("area", LINK, 0, 0, SIZE) == {UNTOUCHED}
    pass_message(right, left, 2, "other")


@any_provider
def test_a_signal_without_the_token_is_dropped_and_counted(hosts: LinkedHosts) -> None:
    left, right = hosts.start(0), hosts.start(1)
    (offer, secret), (theirs, their_secret) = (end.call("open", LINK, AREAS, SIZE) for end in (left, right))
    stranger = LinkSecret.from_buffer_copy(secret)
    stranger.token[0] ^= 1
    left.call("connect", LINK, theirs, their_secret)
    right.call("connect", LINK, offer, bytes(stranger))
    right.send("send", LINK, 5, [])
    while not right.has_answered():
        assert left.call("receive", LINK, 0.1) is None
    if trouble := right.answer():  # it was to connect, and was not let in
        assert "Connection refused" in trouble
        assert hosts.provider == CONNECTED
        return
    while not left.call("refused", LINK):
        assert left.call("receive", LINK, 0.1) is None
    assert left.call("refused", LINK) == 1


def test_a_put_outside_of_the_offer_is_refused_here_already(hosts: LinkedHosts) -> None:
    left, right = hosts.start(0), hosts.start(1)
    link(left, right)
    assert "outside" in left.call("send", LINK, 1, [(0, SIZE - 1, 2)])


def test_bad_arguments_say_what_is_wrong() -> None:
    library = native.load()
    with pytest.raises(EepError, match="no provider nonsense"):
        NativeTransport(library, "nonsense", "127.0.0.1")
    with pytest.raises(EepError, match="address of this host"):
        NativeTransport(library, "tcp", "192.0.2.77")
    with pytest.raises(ValueError, match="name of a provider"):
        NativeTransport(library, "", "127.0.0.1")
    transport = NativeTransport(library, "tcp", "127.0.0.1")
    memory = (ctypes.c_uint8 * 64)()
    with pytest.raises(ValueError, match="at most 16 areas"):
        transport.open_link([(ctypes.addressof(memory), 64)] * 17, LinkSecret())
    with pytest.raises(ValueError, match="no address or no bytes"):
        transport.open_link([(ctypes.addressof(memory), 0)], LinkSecret())
    link = transport.open_link([(ctypes.addressof(memory), 64)], LinkSecret())
    with pytest.raises(ValueError, match="another version"):
        link.connect(LinkOffer(version=99), LinkSecret())
    with pytest.raises(EepError, match="not connected"):
        link.signal(1)
    link.close()
    transport.close()
