"""Links under attack and under failure: who may speak, and what a peer that does not follow the protocol can do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from eep.control.links.host_links import MOST_STRANGERS, HostLinks, listen_at
from eep.control.links.host_records import HostRecord
from eep.control.links.link_messages import FromHost, HostBeat, HostGreeting, HostNews
from eep.control.wire.messages import ControlMessage
from eep.control.wire.sealed_frames import SealedChannel, SessionEnd, new_key
from eep.membership import News

KEY = new_key()
ADDRESS = "127.0.0.1"
PATIENCE = 30.0


@dataclass
class End:
    """One supervisor's links, and what they told it."""

    ident: str
    timeout: float = 30.0
    news: list[News] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        listening = listen_at(ADDRESS, 0)
        self.record = HostRecord(self.ident, ADDRESS, listening.getsockname()[1])
        self.links = HostLinks(
            self.ident,
            KEY,
            listening,
            timeout=self.timeout,
            heartbeat=0.01,
            heard=self.news.append,
            reject=lambda kind, reason: self.rejected.append(kind),
        )

    def know(self, *others: HostRecord) -> None:
        self.links.follow({record.ident: record for record in others})

    def is_linked(self, ident: str) -> bool:
        return ident in self.links.links and self.links.links[ident].may_be_missed


class Impostor:
    """Dials as it likes."""

    def __init__(self, end: End, key: bytes = KEY) -> None:
        self.socket = socket.create_connection((ADDRESS, end.record.port))
        self.socket.setblocking(False)
        self._channel: SealedChannel[ControlMessage] = SealedChannel(key, SessionEnd.CLIENT, FromHost)

    async def greet(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.socket, self._channel.greeting())
        while not self._channel.established:
            self._channel.feed(await loop.sock_recv(self.socket, 1 << 16))

    async def say(self, *messages: ControlMessage) -> None:
        for message in messages:
            await asyncio.get_running_loop().sock_sendall(self.socket, self._channel.seal(message))

    async def is_closed(self) -> bool:
        """Whether the other end closes; what it says before is read."""
        try:
            async with asyncio.timeout(PATIENCE):
                while await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16):
                    pass
        except ConnectionError:
            pass
        return True


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(PATIENCE):
            await body()

    asyncio.run(limited())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_two_ends_link_and_pass_news_both_ways() -> None:
    async def body() -> None:
        a, b = End("a#1"), End("b#1")
        a.know(b.record)
        b.know(a.record)
        await until(lambda: a.is_linked("b#1") and b.is_linked("a#1"))
        a.links.tell(News("a#1", {0: 3}, 4))
        b.links.tell(News("b#1", {}, 5))
        await until(lambda: a.news and b.news)
        assert (a.news[-1], b.news[-1]) == (News("b#1", {}, 5), News("a#1", {0: 3}, 4))
        assert a.rejected == b.rejected == []
        await a.links.stop()
        await b.links.stop()

    run(body)


def test_an_end_that_is_linked_later_is_told_what_is_so() -> None:
    async def body() -> None:
        a, b = End("a#1"), End("b#1")
        a.links.tell(News("a#1", {0: 3}, 4))
        a.know(b.record)
        b.know(a.record)
        await until(lambda: News("a#1", {0: 3}, 4) in b.news)
        await a.links.stop()
        await b.links.stop()

    run(body)


def test_a_link_comes_up_again_when_its_connection_is_lost() -> None:
    async def body() -> None:
        a, b = End("a#1", timeout=0.5), End("b#1", timeout=0.5)
        a.know(b.record)
        b.know(a.record)
        await until(lambda: a.is_linked("b#1"))
        b.links.links["a#1"].close()
        heard = b.links.links["a#1"].heard
        await until(lambda: b.links.links["a#1"].heard > heard and b.links.links["a#1"].is_up)
        await a.links.stop()
        await b.links.stop()

    run(body)


def test_an_end_whose_record_has_gone_is_cut_off() -> None:
    async def body() -> None:
        a, b = End("a#1"), End("b#1")
        a.know(b.record)
        b.know(a.record)
        await until(lambda: a.is_linked("b#1"))
        b.know()
        await until(lambda: not a.links.links["b#1"].is_up)
        assert b.links.links == {}
        await a.links.stop()
        await b.links.stop()

    run(body)


@pytest.mark.parametrize(
    "messages",
    [
        (HostGreeting("c#1", "b#1"),),
        (HostGreeting("a#2", "b#1"),),
        (HostGreeting("a#1", "b#0"),),
        (HostNews({0: 0}, 1),),
        (HostBeat(1),),
        (HostGreeting("a#1", "b#1"), HostGreeting("a#1", "b#1")),
    ],
    ids=["a stranger", "another life", "for another", "no greeting", "beats first", "greets twice"],
)
def test_who_does_not_greet_as_one_that_is_known_is_not_heard(messages: tuple[ControlMessage, ...]) -> None:
    async def body() -> None:
        b = End("b#1")
        b.know(HostRecord("a#1", ADDRESS, 1))
        impostor = Impostor(b)
        await impostor.greet()
        await impostor.say(*messages)
        assert await impostor.is_closed()
        assert b.news == []
        await b.links.stop()

    run(body)


def test_who_does_not_have_the_key_is_not_heard() -> None:
    async def body() -> None:
        b = End("b#1")
        b.know(HostRecord("a#1", ADDRESS, 1))
        impostor = Impostor(b, new_key())
        await impostor.greet()
        await impostor.say(HostGreeting("a#1", "b#1"), HostNews({0: 0}, 1))
        assert await impostor.is_closed()
        assert (b.news, b.rejected) == ([], ["bad-seal"])
        await b.links.stop()

    run(body)


def test_who_says_nothing_is_shut_out_after_a_while() -> None:
    async def body() -> None:
        b = End("b#1", timeout=0.1)
        assert await Impostor(b).is_closed()
        await b.links.stop()

    run(body)


def test_more_strangers_than_there_may_be_are_refused() -> None:
    async def body() -> None:
        b = End("b#1")
        waiting = [Impostor(b) for _ in range(MOST_STRANGERS)]
        await until(lambda: len(b.links._strangers) == MOST_STRANGERS)
        assert await Impostor(b).is_closed()
        assert b.rejected == ["unwelcome"]
        await b.links.stop()
        for each in waiting:
            each.socket.close()

    run(body)


def test_an_echo_of_what_was_never_sent_is_not_believed() -> None:
    async def body() -> None:
        b = End("b#1")
        b.know(HostRecord("a#1", ADDRESS, 1))
        impostor = Impostor(b)
        await impostor.greet()
        await impostor.say(HostGreeting("a#1", "b#1"), HostBeat(1, 2**60))
        await until(lambda: b.links.links["a#1"].heard)
        link = b.links.links["a#1"]
        assert link.heard_us_at is not None
        assert link.heard_us_at <= asyncio.get_running_loop().time()
        await b.links.stop()
        impostor.socket.close()

    run(body)


def test_an_end_that_falls_silent_after_its_first_beat_is_missed() -> None:
    """One that was cut off right after it linked would otherwise stay in until its lease ends."""

    async def body() -> None:
        b = End("b#1")
        b.know(HostRecord("a#1", ADDRESS, 1))
        link = b.links.links["a#1"]
        peer = Impostor(b)
        await peer.greet()
        await peer.say(HostGreeting("a#1", "b#1"))
        await until(lambda: link.is_up)
        assert not link.may_be_missed, "it may not use this connection yet"
        assert link.heard_us_at is not None, "it may miss us from now on"
        await peer.say(HostBeat(1))
        await until(lambda: link.may_be_missed)
        await b.links.stop()
        peer.socket.close()

    run(body)


def test_links_listen_at_the_named_address_alone() -> None:
    with listen_at("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
    with pytest.raises(OSError, match=r"the host links cannot listen at 192\.0\.2\.1, port 0"):
        listen_at("192.0.2.1", 0)
