"""Where a rank learns the checksums of experts that it has not loaded itself.

The ranks that hold an expert publish its checksum. Where this rank has seen none of them, it asks the backups, which were
filled with verified bytes, and then the checkpoint, which all ranks loaded from.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from eep.errors import EepError
from eep.experts.backup.backup_client import BackupClient
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertMemory, checksum
from eep.experts.placement.packing import EMPTY, IntArray
from eep.experts.registry.published_records import RankRecord
from eep.experts.repair.executor import RepairFailed
from eep.experts.repair.reader import Reader, SourceLost, Want
from eep.experts.repair.repair_plan import Transfer
from eep.experts.repair.repair_sources import RepairSources

logger = logging.getLogger(__name__)


def learn_from_rank(checksums: Checksums, record: RankRecord, stored: IntArray) -> None:
    """Adds what a peer says. ``stored[layer, slot]`` is the number of the expert there, counted over all layers."""
    layers, experts = checksums.values.shape
    sums = record.slot_checksums().reshape(stored.shape)
    for layer, slot in np.argwhere(stored != EMPTY).tolist():
        expert = int(stored[layer, slot]) - layer * experts
        if 0 <= layer < layers and 0 <= expert < experts and not checksums.known[layer, expert]:
            checksums.values[layer, expert] = sums[layer, slot]
            checksums.known[layer, expert] = True


def count_clashes(loaded: Checksums, record: RankRecord, stored: IntArray) -> int:
    """How many slots of a peer hold an expert with other bytes than ``loaded`` has of it. ``stored`` as above."""
    layers, experts = loaded.values.shape
    numbers = stored - np.arange(layers)[:, None] * experts
    held = (stored != EMPTY) & (numbers >= 0) & (numbers < experts)
    at = np.where(held, numbers, 0)
    known = np.take_along_axis(loaded.known, at, axis=1)
    other = np.take_along_axis(loaded.values, at, axis=1) != record.slot_checksums().reshape(stored.shape)
    return int((held & known & other).sum())


def learn_for_transfers(
    checksums: Checksums,
    transfers: Sequence[Transfer],
    memory: ExpertMemory,
    sources: RepairSources,
) -> None:
    """Adds what it takes to verify ``transfers``, or raises :class:`RepairFailed`: only verified experts are served."""
    if _unknown(checksums, transfers) and sources.backup is not None:
        _from_backup(checksums, sources.backup)
    unknown = _unknown(checksums, transfers)
    if not unknown:
        return
    trouble = "start a backup service, or name a checkpoint"
    if sources.checkpoint is not None:
        try:
            _from_checkpoint(checksums, unknown, memory, sources.checkpoint)
            return
        except SourceLost as error:
            trouble = str(error)
    raise RepairFailed(f"no rank and no backup knows the checksums of {len(unknown)} experts: {trouble}", transfers)


def _unknown(checksums: Checksums, transfers: Sequence[Transfer]) -> list[tuple[int, int]]:
    """A transfer without a source needs no checksum."""
    return [(t.layer, t.expert) for t in transfers if t.origins and not checksums.known[t.layer, t.expert]]


def _from_backup(checksums: Checksums, backup: BackupClient) -> None:
    try:
        kept = backup.checksums()
    except EepError as error:
        logger.warning("repair does not use the checksums of the backups: %s", error)
        return
    fresh = kept.known & ~checksums.known
    checksums.values[fresh] = kept.values[fresh]
    checksums.known[fresh] = True


def _from_checkpoint(
    checksums: Checksums, unknown: Sequence[tuple[int, int]], memory: ExpertMemory, checkpoint: Reader
) -> None:
    for layer, expert in unknown:
        aside = [torch.empty_like(piece) for piece in memory.pieces(layer, 0)]
        checkpoint.read([Want(layer, expert, 0, aside)])
        checksums.values[layer, expert] = checksum(aside)
        checksums.known[layer, expert] = True
    # A warning, since a checkpoint that was changed after the model was loaded would go unnoticed.
    logger.warning("%d checksums were taken from the checkpoint itself: no rank and no backup had them", len(unknown))
