"""The records that ranks and backup services publish: MessagePack of a fixed shape, checked.

A record names an expert by its number ``layer * experts + expert``. The reader of a record never follows an
address in it: it hands the address to the transfer engine of the publisher, which refuses what it has not
registered.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np
import torch

from eep.errors import EepError
from eep.experts.layout import ExpertLayout, TensorSpec
from eep.experts.placement.packing import EMPTY, IntArray

BACKUPS = "backups/"
RANKS = "ranks/"


class BadRecord(EepError):
    """A record whose parts do not fit together. Readers ignore it."""


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ranks and backup services must agree on: the sizes of the model's experts."""

    layers: int
    experts: int
    tensor_bytes: tuple[int, ...]

    @property
    def number(self) -> int:
        return self.layers * self.experts

    @property
    def expert_bytes(self) -> int:
        return sum(self.tensor_bytes)

    @classmethod
    def of(cls, layout: ExpertLayout, experts: int) -> ModelShape:
        return cls(layout.layers, experts, tuple(spec.nbytes for spec in layout.tensors))

    def layout(self, slots: int) -> ExpertLayout:
        """Where the bytes lie in a region with that many slots. The types are not known here."""
        specs = (TensorSpec(str(i), (n,), torch.uint8) for i, n in enumerate(self.tensor_bytes))
        return ExpertLayout(self.layers, slots, tuple(specs))


class RankRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The live parameters of a rank: ``numbers`` and ``checksums`` of what each ``[layer, slot]`` holds."""

    host: int
    session: str
    address: int
    slots: int
    shape: ModelShape
    numbers: bytes
    checksums: bytes

    def check(self) -> None:
        cells = self.shape.layers * self.slots
        if self.slots < 1 or len(self.numbers) != 8 * cells or len(self.checksums) != 8 * cells:
            raise BadRecord("a rank's tables do not have one entry per layer and slot")
        numbers = self.slot_numbers()
        if numbers.size and not EMPTY <= numbers.min() <= numbers.max() < self.shape.number:
            raise BadRecord("a rank claims to hold experts that do not exist")

    def slot_numbers(self) -> IntArray:
        return np.frombuffer(self.numbers, dtype="<i8").astype(np.int64)

    def slot_checksums(self) -> np.ndarray:
        return np.frombuffer(self.checksums, dtype="<u8").astype(np.uint64)


class BackupExtent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of memory that holds the experts ``numbers``, one after the other."""

    address: int
    numbers: bytes
    checksums: bytes


class BackupRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A backup service, and what it holds."""

    host: int
    session: str
    shape: ModelShape | None
    extents: tuple[BackupExtent, ...]

    def check(self) -> None:
        for extent in self.extents:
            if self.shape is None or len(extent.numbers) % 8 or len(extent.numbers) != len(extent.checksums):
                raise BadRecord("the tables of a backup do not fit each other")
            numbers = np.frombuffer(extent.numbers, dtype="<i8")
            if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.shape.number:
                raise BadRecord("a backup claims to hold experts that do not exist")

    def addresses(self) -> dict[int, int]:
        """Where each expert that it holds begins."""
        size = self.shape.expert_bytes if self.shape else 0
        return {
            int(number): extent.address + index * size
            for extent in self.extents
            for index, number in enumerate(np.frombuffer(extent.numbers, dtype="<i8"))
        }

    def sums(self) -> dict[int, int]:
        return {
            int(number): int(value)
            for extent in self.extents
            for number, value in zip(
                np.frombuffer(extent.numbers, dtype="<i8"),
                np.frombuffer(extent.checksums, dtype="<u8"),
                strict=True,
            )
        }


Record = TypeVar("Record", RankRecord, BackupRecord)


def encode_record(record: RankRecord | BackupRecord) -> bytes:
    record.check()
    return msgspec.msgpack.encode(record)


def decode_record(value: bytes, kind: type[Record]) -> Record:
    try:
        record = msgspec.msgpack.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRecord(f"this is no {kind.__name__}: {error}") from error
    record.check()
    return record


def decode_records(values: dict[str, bytes], prefix: str, kind: type[Record]) -> dict[str, Record]:
    """The good records under ``prefix``, by the rest of their key. Bad records are dropped."""
    records = {}
    for key, value in values.items():
        try:
            records[key.removeprefix(prefix)] = decode_record(value, kind)
        except BadRecord:
            continue
    return records
