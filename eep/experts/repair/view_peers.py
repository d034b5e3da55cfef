"""The other ranks of a view as sources: those of this host by mapped memory, those of other hosts by the transfer engine."""

from __future__ import annotations

from pathlib import Path

from eep.data_plane.memory import MemoryKind
from eep.data_plane.memory.parted import PartedKind
from eep.experts.held_slots import HeldSlots
from eep.experts.instance_hosts import InstanceHosts
from eep.experts.layout import ExpertLayout
from eep.experts.repair.far_peers import FarPeers, FarReader
from eep.experts.repair.peer_memory import MappedPeers
from eep.experts.repair.reader import Reader
from eep.experts.repair.repair_sources import PeerReader
from eep.view import View


class ViewPeers:
    """``far`` is None where all ranks are on one host."""

    def __init__(
        self, layout: ExpertLayout, near: MappedPeers, far: FarPeers | None, hosts: InstanceHosts | None
    ) -> None:
        self._layout, self._near, self._far, self._hosts = layout, near, far, hosts

    def alive(self, rank: int) -> bool:
        """Whether the rank is still there, as far as this host knows: at once on the same host, by its lease on another."""
        if self._far is not None and self._is_far(rank):
            return self._far.is_known(rank)
        return self._near.alive(rank)

    def reader(self, rank: int) -> Reader:
        if self._far is not None and self._is_far(rank):
            return FarReader(self._far, rank)
        return PeerReader(self._layout, self._near, rank)

    def close(self) -> None:
        self._near.close()

    def _is_far(self, rank: int) -> bool:
        return self._hosts is not None and not self._hosts.is_near(rank)


class PeerFinder:
    """Makes the :class:`ViewPeers` of one rank. ``directory``: where ranks of this host hand out their memory. ``usual``: how
    many slots of a rank always have memory; 0 for all."""

    def __init__(
        self,
        directory: Path,
        layout: ExpertLayout,
        kind: MemoryKind,
        slots: HeldSlots,
        hosts: InstanceHosts | None,
        usual: int = 0,
    ) -> None:
        self._directory, self._layout, self._kind, self._slots, self._hosts = directory, layout, kind, slots, hosts
        self.readable = usual if usual and isinstance(kind, PartedKind) else None
        """How many slots of a peer can be read; None for all. Memory for more of them is not handed out where it is in
        parts."""

    def find(self, view: View) -> ViewPeers:
        near = MappedPeers(self._directory, view, self._layout.region_bytes, self._kind)
        far = None
        if self._hosts is not None:
            far = FarPeers(self._hosts.transport, self._layout, lambda rank: self._slots.records(view).get(rank))
        return ViewPeers(self._layout, near, far, self._hosts)
