"""What a process at one end of links can be told to do: it writes patterns into areas of its peer, and checks its own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections import deque
from collections.abc import Callable

from bench.common import network_namespaces
from eep.abi import native
from eep.abi.hosts import LinkOffer, LinkSecret
from eep.abi.link import NativeLink, NativeTransport
from eep.errors import EepError

GUARD = 4096
"""Bytes before and behind each area, which no peer may touch."""
UNTOUCHED = 0xEE
END_S = 30.0


class LinkProgram:
    """Links by name. Answers are plain values."""

    def __init__(self, namespace: str, address: str, provider: str) -> None:
        network_namespaces.enter(namespace)
        self._transport = NativeTransport(native.load(), provider, address)
        self._links: dict[str, NativeLink] = {}
        self._memory: dict[str, ctypes.Array[ctypes.c_uint8]] = {}
        self._arrived: dict[str, deque[tuple[int, ...]]] = {}
        self._bytes = 0

    def open(self, name: str, areas: int, size: int) -> tuple[bytes, bytes]:
        """A link whose peer may write ``areas`` areas of ``size`` bytes. Its offer and its secret."""
        stride = size + 2 * GUARD
        if name not in self._memory:
            self._memory[name] = (ctypes.c_uint8 * (areas * stride)).from_buffer(
                bytearray([UNTOUCHED] * areas * stride)
            )
        memory, self._bytes = self._memory[name], size
        secret = LinkSecret.from_buffer_copy(os.urandom(ctypes.sizeof(LinkSecret)))
        self._arrived[name] = deque()
        start = ctypes.addressof(memory) + GUARD
        self._links[name] = self._transport.open_link([(start + i * stride, size) for i in range(areas)], secret)
        return bytes(self._links[name].offer()), bytes(secret)

    def connect(self, name: str, offer: bytes, secret: bytes) -> None:
        self._links[name].connect(LinkOffer.from_buffer_copy(offer), LinkSecret.from_buffer_copy(secret))

    def send(self, name: str, number: int, puts: list[tuple[int, int, int]], timeout: float = END_S) -> str:
        """A message of ``puts`` (area, offset, size), all bytes of the pattern ``number``. What went wrong, or nothing."""
        try:
            for area, offset, size in puts:
                source = (ctypes.c_uint8 * size)()
                ctypes.memset(source, number % 251, size)
                put = functools.partial(self._links[name].put, area, offset, ctypes.addressof(source), size)
                self._until(name, put, timeout)
                self._until(name, lambda: self._links[name].unread == 0, timeout)
            self._until(name, lambda: self._links[name].signal(number), timeout)
        except (EepError, TimeoutError) as error:
            return str(error)
        return ""

    def put_without_waiting(self, name: str, area: int, size: int, most: int) -> int:
        """How many puts the network took before it took no more, up to ``most``."""
        self._source = (ctypes.c_uint8 * size)()
        for taken in range(most):
            if not self._links[name].put(area, 0, ctypes.addressof(self._source), size):
                return taken
            self._move(name)
        return most

    def receive(self, name: str, timeout: float = END_S) -> tuple[int, ...] | None:
        """The next signal; None if none came in time."""
        end = time.monotonic() + timeout
        with contextlib.suppress(EepError):  # it is broken, and nothing will come
            while not self._arrived[name] and time.monotonic() < end:
                self._move(name)
        return self._arrived[name].popleft() if self._arrived[name] else None

    def stream(self, name: str, messages: int, puts: list[tuple[int, int, int]]) -> int:
        """So many messages, each sent when the peer is done with the one before. How many it answered."""
        for number in range(1, messages + 1):
            assert not self.send(name, number, puts)
            if self.receive(name) != (number, 0, 0, 0, 0, 0):
                return number - 1
        return messages

    def verify(self, name: str, messages: int, puts: list[tuple[int, int, int]]) -> int:
        """Answers the messages of :meth:`stream`. How often a signal came before all that it stands for."""
        violations = 0
        for number in range(1, messages + 1):
            assert self.receive(name) == (number, 0, 0, 0, 0, 0)
            violations += sum(self.area(name, area, offset, size) != {number % 251} for area, offset, size in puts)
            assert not self.send(name, number, [])
        return violations

    def pump(self, name: str, seconds: float) -> str:
        """Moves bytes for a while. What went wrong, or nothing."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self._move(name)
        except EepError as error:
            return str(error)
        return ""

    def area(self, name: str, area: int, offset: int, size: int) -> set[int]:
        """The different bytes of a part of an area."""
        start = area * (self._bytes + 2 * GUARD) + GUARD + offset
        return set(ctypes.string_at(ctypes.addressof(self._memory[name]) + start, size))

    def guards(self, name: str) -> set[int]:
        """The different bytes around the areas."""
        stride, memory = self._bytes + 2 * GUARD, bytes(self._memory[name])
        found: set[int] = set()
        for start in range(0, len(memory), stride):
            found |= set(memory[start : start + GUARD]) | set(memory[start + stride - GUARD : start + stride])
        return found

    def drain(self, name: str, timeout: float) -> bool:
        return self._links[name].drain(timeout)

    def refused(self, name: str) -> int:
        return self._links[name].refused

    def close(self, name: str) -> None:
        self._links.pop(name).close()

    def _until(self, name: str, done: Callable[[], bool], timeout: float) -> None:
        end = time.monotonic() + timeout
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(f"the network took nothing for {timeout} s")
            self._move(name)

    def _move(self, name: str) -> None:
        self._arrived[name].extend(self._links[name].progress())
