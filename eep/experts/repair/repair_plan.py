"""Where the bytes of every missing expert come from. Pure: this module decides, the executor moves.

Sources in order: another slot of the same rank, the memory of a rank of this host, the backup of this host, the memory of a
rank of another host, the backup of another host, disk. Within a tier a transfer goes to the source that would finish it
first, given its bandwidth and what it already has to do. So no source is the bottleneck while another is idle. A transfer
keeps its further sources in order, in case the first one dies or sends wrong bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from eep.experts.placement.packing import EMPTY, BoolArray
from eep.experts.placement.slot_plan import Placement


class Tier(IntEnum):
    """The kinds of source, cheapest first."""

    LOCAL = 0
    PEER = 1
    DRAM = 2
    FAR_PEER = 3
    FAR_DRAM = 4
    DISK = 5

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an expert can be read: a slot of a rank (``LOCAL``, ``PEER``, ``FAR_PEER``), a backup by name, or disk. A far one
    is on another host than the reader."""

    tier: Tier
    rank: int = -1
    slot: int = -1
    backup: str = ""

    def __str__(self) -> str:
        match self.tier:
            case Tier.LOCAL:
                return f"its own slot {self.slot}"
            case Tier.PEER:
                return f"rank {self.rank} slot {self.slot}"
            case Tier.FAR_PEER:
                return f"rank {self.rank} slot {self.slot} of another host"
            case Tier.DRAM:
                return f"backup {self.backup}"
            case Tier.FAR_DRAM:
                return f"backup {self.backup} of another host"
            case Tier.DISK:
                return "disk"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bring ``expert`` of ``layer`` into ``slot`` of ``rank`` from the first of ``origins`` that delivers.

    ``staged``: its first origin is itself about to be overwritten, so the bytes are taken aside before this rank
    writes. If it is another rank's and that rank writes first, they do not verify, and the next origin is read.
    """

    layer: int
    expert: int
    rank: int
    slot: int
    origins: tuple[Origin, ...]
    staged: bool = False


@dataclass(frozen=True, slots=True)
class BackupContents:
    """A backup service as planners see it: its host, and the experts that it has ``held``, ``[layer, expert]``."""

    host: int
    held: BoolArray


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second of one source of each kind, seen from the same host or from another."""

    local: float = 1000e9
    peer: float = 300e9
    peer_far: float = 40e9
    dram: float = 40e9
    dram_far: float = 20e9
    disk: float = 3e9

    def of(self, tier: Tier) -> float:
        return (self.local, self.peer, self.dram, self.peer_far, self.dram_far, self.disk)[tier]


@dataclass(frozen=True)
class RepairPlan:
    transfers: tuple[Transfer, ...]
    expert_bytes: int

    @property
    def unreachable(self) -> tuple[Transfer, ...]:
        """The transfers for which there is no source at all."""
        return tuple(transfer for transfer in self.transfers if not transfer.origins)

    def of(self, rank: int) -> RepairPlan:
        """What one rank has to do."""
        return RepairPlan(tuple(t for t in self.transfers if t.rank == rank), self.expert_bytes)

    def bytes_by_tier(self) -> dict[Tier, int]:
        """The bytes that the first choice of each transfer moves."""
        count = Counter(t.origins[0].tier for t in self.transfers if t.origins)
        return {tier: count[tier] * self.expert_bytes for tier in Tier}

    def explain(self, most: int = 20) -> str:
        """What moves from where, for people: a line per tier, then the first ``most`` transfers."""
        lines = [f"{len(self.transfers)} experts to move, {_size(len(self.transfers) * self.expert_bytes)} in all"]
        for tier, nbytes in self.bytes_by_tier().items():
            if nbytes:
                experts = nbytes // self.expert_bytes
                lines.append(f"  {tier!s:8} {experts:6} experts  {_size(nbytes):>10}")
        if staged := sum(t.staged for t in self.transfers):
            aside = _size(staged * self.expert_bytes)
            lines.append(f"  {staged} of them ({aside}) are taken aside first, since their source is overwritten")
        if self.unreachable:
            lines.append(f"  {len(self.unreachable)} have no source: start a backup service or name a checkpoint")
        for transfer in self.transfers[:most]:
            source = transfer.origins[0] if transfer.origins else "no source"
            spare = f", else {transfer.origins[1]}" if len(transfer.origins) > 1 else ""
            lines.append(
                f"  layer {transfer.layer} expert {transfer.expert} -> rank {transfer.rank} "
                f"slot {transfer.slot} from {source}{spare}"
            )
        if len(self.transfers) > most:
            lines.append(f"  and {len(self.transfers) - most} more")
        return "\n".join(lines)


def plan_repair(
    before: Placement,
    after: Placement,
    active: Iterable[int],
    topology: Sequence[int],
    expert_bytes: int,
    *,
    backups: Mapping[str, BackupContents] | None = None,
    disk: bool = False,
    readable: int | None = None,
) -> RepairPlan:
    """Find sources for every slot that ``after`` fills with an expert that ``before`` did not have there.

    ``before`` is what lies where now; what it says of ranks that are not ``active`` is ignored. ``readable``: how many slots
    of another rank can be read; None for all.
    """
    if before.shape != after.shape:
        raise ValueError(
            f"the placements before and after the repair are of different shapes: {before.shape}, {after.shape}"
        )
    active = sorted(set(active))
    size = after.slots_per_rank
    now, then = before.on(active).physical_to_logical, after.on(active).physical_to_logical
    written = (then != now) & (then != EMPTY)
    asked = np.zeros((after.layers, after.experts), dtype=bool)
    asked[np.nonzero(written)[0], then[written]] = True
    held = (now != EMPTY) & np.take_along_axis(asked, np.maximum(now, 0), axis=1)
    # A slot that the plan overwrites, or clears, is a source only until its rank writes.
    lasting, passing = _holders(now, held & (now == then)), _holders(now, held & (now != then))
    speed = Bandwidth()
    busy: defaultdict[tuple[object, ...], float] = defaultdict(float)
    transfers = []

    def origins_of(holders: Sequence[int], rank: int) -> list[Origin]:
        found = (_slot_origin(holder, rank, size, topology) for holder in holders)
        return [each for each in found if each.tier is Tier.LOCAL or readable is None or each.slot < readable]

    for layer, column in np.argwhere(written).tolist():
        rank, slot = divmod(column, size)
        expert = int(then[layer, column])
        key = (layer, expert)
        origins = origins_of(lasting.get(key, ()), rank)
        passes = [] if origins else origins_of(passing.get(key, ()), rank)
        staged = bool(passes)
        origins += passes
        for name, backup in sorted((backups or {}).items()):
            if backup.held[layer, expert]:
                near = backup.host == topology[rank]
                origins.append(Origin(Tier.DRAM if near else Tier.FAR_DRAM, backup=name))
        if disk:
            origins.append(Origin(Tier.DISK))

        def finish(origin: Origin, rank: int = rank) -> tuple[int, float]:
            return origin.tier, busy[_queue(origin, rank)] + expert_bytes / speed.of(origin.tier)

        origins.sort(key=finish)
        if origins:
            busy[_queue(origins[0], rank)] = finish(origins[0])[1]
        transfers.append(Transfer(layer, expert, rank, slot, tuple(origins), staged))
    return RepairPlan(tuple(transfers), expert_bytes)


def _holders(table: np.ndarray, where: BoolArray) -> dict[tuple[int, int], list[int]]:
    held: dict[tuple[int, int], list[int]] = {}
    for layer, column in np.argwhere(where).tolist():
        held.setdefault((layer, int(table[layer, column])), []).append(column)
    return held


def _slot_origin(column: int, reader: int, slots_per_rank: int, topology: Sequence[int]) -> Origin:
    rank, slot = divmod(column, slots_per_rank)
    if rank == reader:
        return Origin(Tier.LOCAL, rank, slot)
    return Origin(Tier.PEER if topology[rank] == topology[reader] else Tier.FAR_PEER, rank, slot)


def _queue(origin: Origin, reader: int) -> tuple[object, ...]:
    """What works through its transfers one after the other: a source, or a reader's own memory and disk."""
    own = reader if origin.tier in (Tier.LOCAL, Tier.DISK) else -1
    return origin.rank, origin.backup, own


def _size(nbytes: int) -> str:
    power = min(4, max(0, nbytes.bit_length() - 1) // 10)
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.1f} {'BKMGT'[power]}iB"
