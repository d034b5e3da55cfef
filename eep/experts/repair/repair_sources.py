"""What a rank may read a lost expert from, and the reader for each source."""

from __future__ import annotations

from dataclasses import dataclass

from eep.experts.backup.backup_client import BackupClient
from eep.experts.layout import ExpertMemory
from eep.experts.repair.executor import LocalReader, PeerReader, Reader, SourceLost
from eep.experts.repair.peer_memory import PeerMemory
from eep.experts.repair.repair_plan import BackupContents, Origin, Tier


@dataclass(frozen=True, slots=True)
class RepairSources:
    """The sources besides the memory of this rank and of its peers: any of them may be missing."""

    checkpoint: Reader | None = None
    backup: BackupClient | None = None

    def backups(self) -> dict[str, BackupContents]:
        """What each backup service holds now."""
        return {} if self.backup is None else self.backup.backups()

    def reader_of(self, origin: Origin, memory: ExpertMemory, peers: PeerMemory) -> Reader:
        """Raises :class:`SourceLost` if this rank has no such source."""
        match origin.tier:
            case Tier.LOCAL:
                return LocalReader(memory)
            case Tier.PEER:
                return PeerReader(memory.layout, peers, origin.rank)
            case Tier.DRAM if self.backup is not None:
                return self.backup.reader(origin.backup)
            case Tier.DISK if self.checkpoint is not None:
                return self.checkpoint
        raise SourceLost(f"{origin} is not a source of this rank")
