"""Experts that move are staged: each rank reads those that it gets into memory beside its slots, while steps go on.

Nothing is overwritten until every rank has staged, so what moves is read from where it is served. A rank that is lost, or a
slot that changes meanwhile, costs only the staging: what does not verify comes from the next source.
"""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from eep import faults
from eep.errors import EepError
from eep.experts.balancing.placement_log import BaseRecord
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertLayout, ExpertMemory
from eep.experts.placement.slot_plan import Placement
from eep.experts.repair import checksum_sources
from eep.experts.repair.executor import RepairFailed, read_aside
from eep.experts.repair.repair_plan import Transfer, plan_repair
from eep.experts.repair.repair_sources import RepairSources
from eep.experts.repair.view_peers import PeerFinder
from eep.experts.standing import Standing, place


@dataclass(frozen=True, eq=False)
class Staged:
    """What a rank has ready for a switch: the bytes of ``transfers[i]`` are in ``places[i]``."""

    standing: Standing
    """What counts until then."""
    attempt: int
    record: BaseRecord
    placement: Placement
    transfers: tuple[Transfer, ...]
    places: tuple[list[torch.Tensor], ...]

    @property
    def word(self) -> int:
        """What ranks tell each other: the same where they have staged the same, and never 0."""
        text = f"{self.standing.next_name}.{self.attempt}.{self.placement.digest}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1


def make_room(memory: ExpertMemory, most: int) -> ExpertMemory:
    """Memory beside that of the slots, on the same device, for ``most`` experts."""
    layout = ExpertLayout(1, most, memory.layout.tensors)
    return ExpertMemory(layout, torch.empty(layout.region_bytes, dtype=torch.uint8, device=memory.region.device))


class StagingArea:
    """``aside`` is the memory for it, one layer with a slot for each expert that may move at once."""

    def __init__(
        self,
        rank: int,
        memory: ExpertMemory,
        aside: ExpertMemory,
        checksums: Checksums,
        sources: RepairSources,
        finder: PeerFinder,
    ) -> None:
        self._rank, self._memory, self._checksums = rank, memory, checksums
        self._sources, self._finder = sources, finder
        self._aside, self.most = aside, aside.layout.slots
        self._late: tuple[Future[Any], ...] = ()
        """Reads that did not end in time. Each may still write into the memory."""

    def prepare(self, standing: Standing, attempt: int, record: BaseRecord, within: float) -> Staged:
        """Stage what ``record`` gives to this rank. Raises an :class:`EepError` if that cannot be done."""
        deadline = time.monotonic() + within
        self._late = tuple(wait(self._late, timeout=within).not_done)
        if self._late:
            raise EepError(f"{len(self._late)} sources still read for an earlier switch")
        view, after = standing.view, place(standing.view, record)
        steps = plan_repair(
            standing.placement,
            after,
            view.active,
            record.topology,
            self._memory.layout.expert_bytes,
            backups=self._sources.backups(),
            disk=self._sources.checkpoint is not None,
        ).of(self._rank)
        if len(steps.transfers) > self.most:
            raise EepError(f"{len(steps.transfers)} experts are to move here, and there is room for {self.most}")
        places = tuple(self._aside.pieces(0, number) for number in range(len(steps.transfers)))
        checksum_sources.learn_for_transfers(self._checksums, steps.transfers, self._memory, self._sources)
        peers = self._finder.find(view)
        try:
            read_aside(
                steps,
                places,
                self._memory,
                lambda origin: self._sources.reader_of(origin, self._memory, peers),
                self._checksums,
                timeout=max(0.0, deadline - time.monotonic()),
                passed=_pass_point,
            )
        except RepairFailed as error:
            self._late = error.still_reading
            raise
        finally:
            peers.close()
        faults.at("balance.staged")
        return Staged(standing, attempt, record, after, steps.transfers, places)


def _pass_point() -> None:
    faults.at("balance.staging")
