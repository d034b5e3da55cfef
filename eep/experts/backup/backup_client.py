"""The rank's side of backup: show live parameters to the services, and read experts back from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eep.data_plane.memory.shm import SharedMemory
from eep.experts.backup.transport import TransferFailed, Transport
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertLayout
from eep.experts.placement.packing import EMPTY
from eep.experts.placement.slot_plan import Placement
from eep.experts.registry.directory_registry import Registry
from eep.experts.registry.published_records import (
    BACKUPS,
    RANKS,
    BackupRecord,
    ModelShape,
    RankRecord,
    decode_records,
    encode_record,
)
from eep.experts.repair.reader import SourceLost, Want
from eep.experts.repair.repair_plan import BackupContents


class LiveParameters:
    """Lets backup services read the experts of this rank, and says which they are.

    Withdraw before the experts change and publish again afterwards. The checksum catches what a service copied in
    between.
    """

    def __init__(self, registry: Registry, transport: Transport, rank: int, host: int, memory: SharedMemory) -> None:
        self._registry = registry
        self._transport = transport
        self._rank = rank
        self._host = host
        self._memory = memory
        self._address: int | None = None

    def publish(self, layout: ExpertLayout, placement: Placement, checksums: Checksums) -> None:
        size = placement.slots_per_rank
        held = placement.physical_to_logical[:, self._rank * size : (self._rank + 1) * size]
        layer = np.arange(placement.layers)[:, None]
        sums = np.where(held == EMPTY, np.uint64(0), checksums.values[layer, np.maximum(held, 0)])
        if self._address is None:
            self._address = self._transport.expose(self._memory)
        record = RankRecord(
            self._host,
            self._transport.session,
            self._address,
            size,
            ModelShape.of(layout, placement.experts),
            np.where(held == EMPTY, EMPTY, held + layer * placement.experts).astype("<i8").tobytes(),
            sums.astype("<u8").tobytes(),
        )
        self._registry.publish(f"{RANKS}{self._rank}", encode_record(record))

    def withdraw(self) -> None:
        self._registry.withdraw(f"{RANKS}{self._rank}")
        if self._address is not None:
            self._transport.withdraw(self._address)
            self._address = None


class BackupClient:
    """The backup services as a rank sees them: what they hold, for the planner, and a reader for each."""

    def __init__(self, registry: Registry, transport: Transport, layout: ExpertLayout, experts: int) -> None:
        self.registry, self.transport, self.experts = registry, transport, experts
        self._shape = ModelShape.of(layout, experts)

    def records(self) -> dict[str, BackupRecord]:
        """The services that are there now and hold experts of this model."""
        found = decode_records(self.registry.scan(BACKUPS), BACKUPS, BackupRecord)
        return {name: record for name, record in found.items() if record.shape == self._shape}

    def backups(self) -> dict[str, BackupContents]:
        """What the repair planner needs to know of them."""
        result = {}
        for name, record in self.records().items():
            held = np.zeros(self._shape.number, dtype=bool)
            held[list(record.addresses())] = True
            result[name] = BackupContents(record.host, held.reshape(self._shape.layers, self._shape.experts))
        return result

    def checksums(self) -> Checksums:
        """The checksums that the services know, for a joiner whose peers may be gone."""
        parts = [Checksums.none(self._shape.layers, self._shape.experts)]
        for record in self.records().values():
            part = Checksums.none(self._shape.layers, self._shape.experts)
            for number, value in record.sums().items():
                part.values.flat[number] = value
                part.known.flat[number] = True
            parts.append(part)
        return Checksums.merged(parts)

    def reader(self, name: str) -> BackupReader:
        return BackupReader(self, self._shape, name)


class BackupReader:
    """One backup service as a source of repair."""

    def __init__(self, client: BackupClient, shape: ModelShape, name: str) -> None:
        self._client = client
        self._shape = shape
        self._name = name

    def alive(self) -> bool:
        return self._name in self._client.records()

    def read(self, wants: Sequence[Want]) -> None:
        record = self._client.records().get(self._name)
        if record is None:
            raise SourceLost(f"backup {self._name} is gone")
        addresses = record.addresses()
        parts = []
        for want in wants:
            address = addresses.get(want.layer * self._shape.experts + want.expert)
            if address is None or tuple(piece.numel() for piece in want.into) != self._shape.tensor_bytes:
                raise SourceLost(f"backup {self._name} does not hold expert {want.expert} of layer {want.layer}")
            for piece in want.into:
                parts.append((address, piece))
                address += piece.numel()
        try:
            self._client.transport.read(record.session, parts)
        except TransferFailed as error:
            raise SourceLost(str(error)) from error
