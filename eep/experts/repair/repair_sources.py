"""What a rank may read a lost expert from, and the reader for each source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from eep.errors import PeerUnreachable
from eep.experts.backup.backup_client import BackupClient
from eep.experts.layout import ExpertLayout, ExpertMemory
from eep.experts.repair.peer_memory import PeerMemory, copy_all
from eep.experts.repair.reader import Reader, SourceLost, Want
from eep.experts.repair.repair_plan import BackupContents, Origin, Tier


@dataclass
class PeerReader:
    """The memory of a peer, mapped here."""

    layout: ExpertLayout
    peers: PeerMemory
    rank: int

    def alive(self) -> bool:
        return self.peers.alive(self.rank)

    def read(self, wants: Sequence[Want]) -> None:
        try:
            theirs = ExpertMemory(self.layout, self.peers.region(self.rank))
        except PeerUnreachable as error:
            raise SourceLost(str(error)) from error
        _copy(wants, theirs)


@dataclass
class LocalReader:
    """The memory of this rank."""

    memory: ExpertMemory

    def alive(self) -> bool:
        return True

    def read(self, wants: Sequence[Want]) -> None:
        _copy(wants, self.memory)


def _copy(wants: Sequence[Want], memory: ExpertMemory) -> None:
    sources = [memory.pieces(want.layer, want.slot) for want in wants]
    copy_all(list(chain.from_iterable(want.into for want in wants)), list(chain.from_iterable(sources)))


class PeerSources(Protocol):
    """The other ranks of a view."""

    def reader(self, rank: int) -> Reader: ...


@dataclass(frozen=True, slots=True)
class RepairSources:
    """The sources besides the memory of this rank and of its peers: any of them may be missing."""

    checkpoint: Reader | None = None
    backup: BackupClient | None = None

    def backups(self) -> dict[str, BackupContents]:
        """What each backup service holds now."""
        return {} if self.backup is None else self.backup.backups()

    def reader_of(self, origin: Origin, memory: ExpertMemory, peers: PeerSources) -> Reader:
        """Raises :class:`SourceLost` if this rank has no such source."""
        match origin.tier:
            case Tier.LOCAL:
                return LocalReader(memory)
            case Tier.PEER | Tier.FAR_PEER:
                return peers.reader(origin.rank)
            case Tier.DRAM | Tier.FAR_DRAM if self.backup is not None:
                return self.backup.reader(origin.backup)
            case Tier.DISK if self.checkpoint is not None:
                return self.checkpoint
        raise SourceLost(f"{origin} is not a source of this rank")
