"""The backup service: one process per host that keeps experts in host memory for repair to read.

It looks at the registry and works out its share (``shares``). It copies what it lacks from live ranks, from
other services or from a checkpoint, verifies every expert, and publishes where each one lies. It does so
again after every change. So the other services take over the share of one that died, and one that comes back
fills up.

Memory that is filled is never written again: what peers read is a read-only mapping of it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError
from eep.experts.backup.fill import ExpertCopy, fetch_copy, find_copies, load_from_checkpoint
from eep.experts.backup.shares import NOWHERE, choose_share, find_only_hosts
from eep.experts.backup.transport import Transport
from eep.experts.checkpoint.conversion import Checkpoint, open_checkpoint
from eep.experts.placement.packing import EMPTY, BoolArray, IntArray
from eep.experts.registry.directory_registry import Registry, wait_for_change
from eep.experts.registry.published_records import (
    BACKUPS,
    RANKS,
    BackupExtent,
    BackupRecord,
    ModelShape,
    RankRecord,
    decode_records,
    encode_record,
)
from eep.experts.repair.reader import SourceLost
from eep.experts.repair.repair_plan import BackupContents

_EXTENT_BYTES = 2 << 30


class BackupTooLarge(EepError):
    """The share of this service does not fit into the memory it may use."""


@dataclass(frozen=True, slots=True)
class BackupOptions:
    name: str
    host: int
    memory_bytes: int
    replicas: int = 1
    expected: int = 1
    """How many services to wait for before sharing out, so that the first does not take everything."""
    checkpoint: str | None = None
    family: str | None = None
    layers: tuple[int, ...] | None = None
    """The layers of the checkpoint to keep; all that have experts if that is not said."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """What the tensors of an expert are served as, where that is not how the checkpoint has them."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"a backup service needs a name without slashes, got {self.name!r}")
        if self.replicas < 1 or self.expected < 1 or self.memory_bytes < 1:
            raise ValueError("replicas, expected services and memory must all be at least 1")


@dataclass
class _Filled:
    memory: SharedMemory
    extent: BackupExtent


@dataclass
class BackupService:
    """Call :meth:`refresh` whenever the registry changes; it returns what it has added."""

    registry: Registry
    transport: Transport
    options: BackupOptions
    tell: Callable[[str], None] = print
    progress: Callable[[list[int]], Iterable[int]] = iter
    _filled: list[_Filled] = field(default_factory=list)
    _shape: ModelShape | None = None
    _checkpoint: Checkpoint | None = None

    def start(self) -> None:
        """Make this service known, with nothing in it yet."""
        wanted = self.options
        if wanted.checkpoint is not None:
            self._checkpoint = open_checkpoint(wanted.checkpoint, wanted.family, wanted.layers, wanted.dtypes)
            self._shape = ModelShape.of(self._checkpoint.layout, self._checkpoint.experts)
        self._publish()

    def stop(self) -> None:
        self.registry.withdraw(BACKUPS + self.options.name)
        for filled in self._filled:
            self.transport.withdraw(filled.extent.address)
            filled.memory.close()
        self._filled.clear()

    @property
    def used_bytes(self) -> int:
        size = self._shape.expert_bytes if self._shape else 0
        return sum(len(filled.extent.numbers) // 8 * size for filled in self._filled)

    def refresh(self) -> int:
        """Add what this service should hold now and does not; the number of experts added."""
        if self.options.name not in (services := self._services()):
            self._publish_again()
            services = self._services()
        ranks = decode_records(self.registry.scan(RANKS), RANKS, RankRecord)
        if self._shape is None and ranks:
            self._shape = ranks[min(ranks)].shape
        if self._shape is None or len(services) < self.options.expected or self.options.name not in services:
            return 0
        ranks = {name: record for name, record in ranks.items() if record.shape == self._shape}
        services = {name: r for name, r in services.items() if r.shape in (None, self._shape)}
        wanted = self._wanted(services, ranks)
        del services[self.options.name]
        copies = find_copies(self._shape, ranks, services)
        if self._checkpoint is None:
            wanted = wanted[np.isin(wanted, list(copies))]
        if not len(wanted):
            return 0
        size = self._shape.expert_bytes
        self._check_memory(len(wanted) * size)
        # Part by part, so that what is there can be used while the rest is still on its way.
        queue, added = iter(self.progress(wanted.tolist())), 0
        for start in range(0, len(wanted), most := max(1, _EXTENT_BYTES // size)):
            added += self._fill(queue, min(most, len(wanted) - start), copies)
        if added < len(wanted):
            self.tell(f"{len(wanted) - added} experts could not be copied; they are tried again")
        return added

    def _services(self) -> dict[str, BackupRecord]:
        return decode_records(self.registry.scan(BACKUPS), BACKUPS, BackupRecord)

    def _publish_again(self) -> None:
        """The record has gone: another service of this name had taken its place and has left, or its lease has ended."""
        try:
            self._publish()
        except EepError as error:  # what it keeps is of use again once the registry answers
            self.tell(
                f"backup {self.options.name} could not publish its record, so ranks do not find it: {error}; it tries again"
            )

    def _wanted(self, services: dict[str, BackupRecord], ranks: dict[str, RankRecord]) -> IntArray:
        assert self._shape is not None
        number = self._shape.number
        live: dict[int, BoolArray] = {}
        for rank in ranks.values():
            numbers = rank.slot_numbers()
            live.setdefault(rank.host, np.zeros(number, dtype=bool))[numbers[numbers != EMPTY]] = True
        known = {
            name: BackupContents(record.host, _mask(record.addresses(), number)) for name, record in services.items()
        }
        only = find_only_hosts(live, number) if live else np.full(number, NOWHERE, dtype=np.int64)
        return np.flatnonzero(choose_share(self.options.name, known, only, self.options.replicas))

    def _fill(self, queue: Iterator[int], most: int, copies: dict[int, list[ExpertCopy]]) -> int:
        """Copy the next ``most`` experts of ``queue`` into one piece of memory and publish it; how many it holds."""
        assert self._shape is not None
        size = self._shape.expert_bytes
        memory = SharedMemory.create(f"eep-backup-{self.options.name}", most * size)
        region = memory.bytes_at(0, memory.size)
        kept: list[tuple[int, int]] = []
        for number in itertools.islice(queue, most):
            target = region[len(kept) * size : (len(kept) + 1) * size]
            value = self._copy(number, copies.get(number, []), target)
            if value is not None:
                kept.append((number, value))
        if not kept:
            memory.close()
            return 0
        numbers = np.array([number for number, _ in kept], dtype="<i8").tobytes()
        sums = np.array([value for _, value in kept], dtype="<u8").tobytes()
        self._filled.append(_Filled(memory, BackupExtent(self.transport.expose(memory), numbers, sums)))
        self._publish()
        return len(kept)

    def _copy(self, number: int, copies: list[ExpertCopy], target: torch.Tensor) -> int | None:
        assert self._shape is not None
        value = fetch_copy(self.transport, number, copies, target)
        if value is None and self._checkpoint is not None:
            try:
                return load_from_checkpoint(self._checkpoint.reader, self._shape, number, copies, target)
            except SourceLost as error:
                self.tell(str(error))
        return value

    def _check_memory(self, more: int) -> None:
        free = _available_memory()
        allowed = min(self.options.memory_bytes - self.used_bytes, free)
        self.tell(
            f"backup {self.options.name} keeps {self.used_bytes / 2**30:.2f} GiB and is to keep "
            f"{more / 2**30:.2f} GiB more"
        )
        if more > allowed:
            raise BackupTooLarge(
                f"backup {self.options.name} should keep {more / 2**30:.2f} GiB more, but may use "
                f"{(self.options.memory_bytes - self.used_bytes) / 2**30:.2f} GiB more and the host has "
                f"{free / 2**30:.2f} GiB free: allow more with --memory, start services on more hosts, or "
                "ask for fewer --replicas"
            )

    def _publish(self) -> None:
        extents = tuple(filled.extent for filled in self._filled)
        record = BackupRecord(self.options.host, self.transport.session, self._shape, extents)
        self.registry.publish(BACKUPS + self.options.name, encode_record(record))


def serve_backup(service: BackupService, stop: threading.Event, retry: float = 1.0) -> None:
    """Keep ``service`` filled until ``stop`` is set.

    If its first share does not fit, the service is of no use and ends. If the share of another service falls to it
    later and does not fit, the service says so and goes on with what it has.
    """
    service.start()
    try:
        known: dict[str, bytes] = {}
        while not stop.is_set():
            try:
                added = service.refresh()
                if added:
                    service.tell(f"backup {service.options.name} now keeps {service.used_bytes / 2**30:.2f} GiB")
            except BackupTooLarge as error:
                if not service.used_bytes:
                    raise
                service.tell(str(error))
            known = wait_for_change(service.registry, "", known, retry)
    finally:
        service.stop()


def _mask(numbers: dict[int, int], number: int) -> BoolArray:
    mask = np.zeros(number, dtype=bool)
    mask[list(numbers)] = True
    return mask


def _available_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise EepError("this kernel does not say how much memory is free (no MemAvailable in /proc/meminfo)")
