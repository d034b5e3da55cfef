"""What backups and ranks ask of the way by which they read each other's memory.

``transfer_engine`` has the one there is, over Mooncake. Who reads verifies by checksum: a transport promises nothing about
bytes that their owner changes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from eep.errors import EepError

if TYPE_CHECKING:
    import torch

    from eep.data_plane.memory.shm import SharedMemory


class TransferFailed(EepError):
    """A read failed, or took too long."""


class Transport(Protocol):
    """One process's end. Its methods may be called from any thread."""

    @property
    def session(self) -> str:
        """The name under which peers read from this process."""
        ...

    def expose(self, memory: SharedMemory) -> int:
        """Let peers read ``memory``; the address at which they do."""
        ...

    def withdraw(self, address: int) -> None:
        """Take back what :meth:`expose` gave out."""
        ...

    def read(self, session: str, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Fill each tensor from the address beside it at ``session``, or raise :class:`TransferFailed`."""
        ...
