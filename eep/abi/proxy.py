"""The proxy of the native library: a thread that moves what a rank exchanges with peers on other hosts. See
``eep_cuda/include/eep/hosts.h``."""

from __future__ import annotations

import ctypes

from eep.abi.hosts import LinkOffer, LinkSecret, RemotePeer
from eep.abi.native import NativeLibrary, Shape, check


class NativeProxy:
    """An ``eep_proxy``. Links have numbers. None of its methods may be called after :meth:`stop`."""

    def __init__(
        self,
        library: NativeLibrary,
        shape: Shape,
        rank: int,
        region: int,
        control: int,
        waits: int,
        provider: str,
        address: str,
    ) -> None:
        """``region``, ``control`` and ``waits`` are addresses of memory that must outlive it."""
        self._library = library
        self._handle = ctypes.c_void_p()
        names = provider.encode(), address.encode()
        self._check(library.eep_proxy_start(shape, rank, region, control, waits, *names, self._handle))

    def invite(self, peer: RemotePeer, secret: LinkSecret) -> tuple[int, LinkOffer]:
        """Opens a link for one life of a rank. Its number, and what the peer must know to connect."""
        offer, link = LinkOffer(), ctypes.c_uint32()
        self._check(self._library.eep_proxy_invite(self._handle, peer, secret, offer, link))
        return link.value, offer

    def connect(self, link: int, offer: LinkOffer, secret: LinkSecret) -> None:
        self._check(self._library.eep_proxy_connect(self._handle, link, offer, secret))

    def is_up(self, link: int) -> bool:
        """Whether both ends have heard of each other. :class:`eep.EepError` if the link is broken."""
        is_up = ctypes.c_uint32()
        self._check(self._library.eep_proxy_is_up(self._handle, link, is_up))
        return bool(is_up.value)

    def dismiss(self, link: int) -> None:
        """Closes a link. Afterwards nothing of that peer is written here, and its mirror may go."""
        self._check(self._library.eep_proxy_dismiss(self._handle, link))

    def ended(self, link: int) -> int:
        """A descriptor that becomes readable when the link ends by itself. It goes with the link."""
        descriptor = ctypes.c_int()
        self._check(self._library.eep_proxy_ended(self._handle, link, descriptor))
        return descriptor.value

    def take_leave(self, timeout: float) -> bool:
        """Whether every peer has heard within ``timeout`` seconds that this rank leaves, and has got all that it was owed."""
        return bool(self._library.eep_proxy_take_leave(self._handle, int(timeout * 1e9)))

    def watch(self) -> None:
        """For kernels of a GPU, which cannot ring: from now on the proxy looks by itself."""
        self._library.eep_proxy_watch(self._handle)

    def stop(self) -> None:
        self._library.eep_proxy_stop(self._handle)
        self._handle = ctypes.c_void_p()

    def _check(self, code: int) -> None:
        check(self._library, code)
