"""The filling of a backup: where copies of each expert are, and how one is fetched and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eep.experts.backup.transport import TransferFailed, Transport
from eep.experts.layout import checksum
from eep.experts.placement.packing import EMPTY
from eep.experts.registry.published_records import BackupRecord, ModelShape, RankRecord
from eep.experts.repair.reader import Reader, SourceLost, Want


@dataclass(frozen=True, slots=True)
class ExpertCopy:
    """A copy of an expert: the address and length of its pieces at ``session``, and their checksum."""

    session: str
    pieces: tuple[tuple[int, int], ...]
    checksum: int


def find_copies(
    shape: ModelShape, ranks: Mapping[str, RankRecord], services: Mapping[str, BackupRecord]
) -> dict[int, list[ExpertCopy]]:
    """All copies of each expert that these ranks and services offer."""
    copies: dict[int, list[ExpertCopy]] = {}
    for rank in ranks.values():
        layout = rank.shape.layout(rank.slots)
        sums = rank.slot_checksums()
        for cell, number in enumerate(rank.slot_numbers().tolist()):
            if number != EMPTY:
                pieces = layout.pieces(cell // rank.slots, cell % rank.slots)
                there = tuple((rank.address + offset, length) for offset, length in pieces)
                copies.setdefault(number, []).append(ExpertCopy(rank.session, there, int(sums[cell])))
    for service in services.values():
        sums_held = service.sums()
        for number, address in service.addresses().items():
            whole = ((address, shape.expert_bytes),)
            copies.setdefault(number, []).append(ExpertCopy(service.session, whole, sums_held[number]))
    return copies


def fetch_copy(transport: Transport, number: int, copies: Sequence[ExpertCopy], target: torch.Tensor) -> int | None:
    """Copy an expert from the first of its ``copies`` whose bytes are right; its checksum, or None."""
    for turn in range(len(copies)):
        # Start at another copy for each expert, so that all owners of copies share the work.
        copy = copies[(number + turn) % len(copies)]
        parts, position = [], 0
        for address, length in copy.pieces:
            parts.append((address, target[position : position + length]))
            position += length
        try:
            transport.read(copy.session, parts)
        except TransferFailed:
            continue
        if checksum([target]) == copy.checksum:
            return copy.checksum
    return None


def load_from_checkpoint(
    checkpoint: Reader, shape: ModelShape, number: int, copies: Sequence[ExpertCopy], target: torch.Tensor
) -> int:
    """Read an expert from disk; its checksum. Raises :class:`SourceLost` if live copies have other bytes."""
    layer, expert = divmod(number, shape.experts)
    checkpoint.read([Want(layer, expert, -1, list(torch.split(target, list(shape.tensor_bytes))))])
    value = checksum([target])
    if copies and value not in {copy.checksum for copy in copies}:
        raise SourceLost(
            f"expert {expert} of layer {layer} differs between the checkpoint and the model, which was converted "
            "when it was loaded: fill the backup from the live parameters"
        )
    return value
