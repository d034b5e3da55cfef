"""What a repair asks of a source of experts.

The executor knows each of its sources as a :class:`Reader`. The memory of a rank (``repair/repair_sources``), a backup
service (``backup/backup_client``) and a checkpoint (``checkpoint/``) come with one. A reader delivers what its source has;
the executor verifies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eep.errors import EepError


class SourceLost(EepError):
    """A source could not deliver. The next source takes over."""


@dataclass(frozen=True, slots=True)
class Want:
    """Expert ``expert`` of ``layer``, at the source's ``slot`` if it has slots, to be read into ``into``."""

    layer: int
    expert: int
    slot: int
    into: list[torch.Tensor]


class Reader(Protocol):
    """One source. Readers of different sources are used by different threads at the same time."""

    def alive(self) -> bool:
        """Whether the source is still there. The executor asks before each batch."""
        ...

    def read(self, wants: Sequence[Want]) -> None:
        """Fill every ``into``, or raise :class:`SourceLost`."""
        ...
