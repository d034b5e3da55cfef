"""A transport and its links as the native library has them, each call checked. See ``eep_cuda/include/eep/hosts.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from eep.abi.hosts import SIGNAL_WORDS, Area, LinkOffer, LinkSecret, Signal
from eep.abi.native import NativeLibrary, check

_MOST_SIGNALS = 32


class NativeTransport:
    """An ``eep_hosts``. One thread at a time may use it and its links."""

    def __init__(self, library: NativeLibrary, provider: str, address: str) -> None:
        self.library = library
        self.handle = ctypes.c_void_p()
        check(library, library.eep_hosts_open(provider.encode(), address.encode(), self.handle))

    def open_link(self, areas: Sequence[tuple[int, int]], secret: LinkSecret) -> NativeLink:
        """A link whose peer may write ``areas``: addresses and sizes. They must outlive it."""
        return NativeLink(self, areas, secret)

    def close(self) -> None:
        """After all links."""
        self.library.eep_hosts_close(self.handle)
        self.handle = ctypes.c_void_p()


class NativeLink:
    """An ``eep_link``. :class:`eep.EepError` from any call means that it is broken for good."""

    def __init__(self, transport: NativeTransport, areas: Sequence[tuple[int, int]], secret: LinkSecret) -> None:
        self._library = transport.library
        self._handle = ctypes.c_void_p()
        given = (Area * len(areas))(*[Area(address, size) for address, size in areas])
        self._check(self._library.eep_link_open(transport.handle, given, len(areas), secret, self._handle))

    def offer(self) -> LinkOffer:
        offer = LinkOffer()
        self._library.eep_link_offered(self._handle, offer)
        return offer

    def connect(self, peer: LinkOffer, secret: LinkSecret) -> None:
        """``secret`` is the one that the peer made for its end."""
        self._check(self._library.eep_link_connect(self._handle, peer, secret))

    def put(self, area: int, offset: int, address: int, size: int) -> bool:
        """False: the network takes no more just now."""
        done = ctypes.c_uint32()
        self._check(self._library.eep_link_put(self._handle, area, offset, address, size, done))
        return bool(done.value)

    def signal(self, *words: int) -> bool:
        """Ends the message. False: the network takes no more just now."""
        done = ctypes.c_uint32()
        padded = [*words, *[0] * (SIGNAL_WORDS - len(words))]
        self._check(
            self._library.eep_link_signal(self._handle, Signal((ctypes.c_uint64 * SIGNAL_WORDS)(*padded)), done)
        )
        return bool(done.value)

    def progress(self) -> list[tuple[int, ...]]:
        """Moves bytes, both ways. The signals of the peer whose messages are whole."""
        signals, count = (Signal * _MOST_SIGNALS)(), ctypes.c_uint32()
        self._check(self._library.eep_link_progress(self._handle, signals, _MOST_SIGNALS, count))
        return [tuple(signal.words) for signal in signals[: count.value]]

    def drain(self, timeout: float) -> bool:
        """Whether all that was put has been read before ``timeout`` seconds were over."""
        done = ctypes.c_uint32()
        self._check(self._library.eep_link_drain(self._handle, int(timeout * 1e9), done))
        return bool(done.value)

    @property
    def unread(self) -> int:
        return self._library.eep_link_unread(self._handle)

    @property
    def refused(self) -> int:
        """Signals that did not verify."""
        return self._library.eep_link_refused(self._handle)

    def close(self) -> None:
        self._library.eep_link_close(self._handle)
        self._handle = ctypes.c_void_p()

    def _check(self, code: int) -> None:
        check(self._library, code)
