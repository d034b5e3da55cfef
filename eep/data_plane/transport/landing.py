"""What a rank on a GPU has in common with its proxy: host memory at addresses that kernels use, too.

The *landing* stands for the region of this rank towards ranks of other hosts: kernels put there what is to be sent, and carry
from there to the region what has come. Mirrors are shown to the kernels as long as their links are open.
"""

from __future__ import annotations

from collections.abc import Container

from eep.abi.context import NativeContext
from eep.abi.native import Shape
from eep.data_plane.memory.shm import SharedMemory
from eep.errors import PeerUnreachable


class Landing:
    """Of one context. To be closed after it."""

    def __init__(self, size: int) -> None:
        """``size`` is that of the region. Only what is for other hosts takes memory."""
        self.memory = SharedMemory.placeholder(size)
        self._context: NativeContext | None = None
        self._remote = 0

    def serve(self, context: NativeContext, shape: Shape, elsewhere: Container[int]) -> None:
        """Shows it to the kernels, for the ranks that are ``elsewhere`` now. What tokens need has room for these only; lanes
        are the same for all ranks."""
        ranks = range(shape.max_ranks)
        remote = sum(1 << rank for rank in ranks if not shape.channels or rank in elsewhere)
        context.span_hosts(self.memory.address, remote)
        self._context, self._remote = context, remote

    def check(self, rank: int) -> None:
        """Raises :class:`PeerUnreachable` for a rank that has no place here."""
        if not self._remote >> rank & 1:
            raise PeerUnreachable(
                f"rank {rank} was on this host when this rank began, and a rank on a GPU has memory only for those that "
                "were on other hosts then; start this rank again to reach it there"
            )

    def show(self, mirror: int, own_incarnation: int) -> None:
        if self._context is not None:
            self._context.show_mirror(mirror, own_incarnation)

    def hide(self, mirror: int) -> None:
        if self._context is not None:
            self._context.hide_mirror(mirror)

    def close(self) -> None:
        self._context = None
        self.memory.close()
