"""A rank shows its experts to the backup services while they lack some of them, and no longer.

A thread looks at what the services hold. While they lack an expert of this rank, it exposes the rank's memory for reading
(:class:`~eep.experts.backup.backup_client.LiveParameters`); serving goes on meanwhile. A slot that repair overwrites during a
read does not verify, and the service does not keep it. GPU memory is copied to the host first, and the copy is exposed.
"""

from __future__ import annotations

import logging
import threading

import numpy as np

from eep.data_plane.memory.shm import SharedMemory
from eep.errors import EepError
from eep.experts.backup.backup_client import BackupClient, LiveParameters
from eep.experts.checksums import Checksums
from eep.experts.layout import ExpertMemory
from eep.experts.placement.packing import EMPTY, BoolArray, IntArray
from eep.experts.placement.slot_plan import Placement
from eep.experts.registry.published_records import BACKUPS

logger = logging.getLogger(__name__)
_LOOKS_EVERY_S = 1.0


class LiveOffer:
    """``shared`` is the host memory behind ``memory``; None if there is none, and a copy must be made."""

    def __init__(
        self,
        rank: int,
        services: BackupClient,
        memory: ExpertMemory,
        shared: SharedMemory | None,
        every: float = _LOOKS_EVERY_S,
    ) -> None:
        self._rank, self._services, self._memory, self._shared, self._every = rank, services, memory, shared, every
        self._held: tuple[IntArray, Checksums] | None = None
        self._offered: IntArray | None = None
        self._looked: tuple[IntArray, dict[str, bytes]] | None = None
        self._live: LiveParameters | None = None
        self._copy: SharedMemory | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"eep-offer-{rank}", daemon=True)
        self._thread.start()

    def holds(self, held: IntArray, checksums: Checksums) -> None:
        """What the slots hold from now on, ``[layers, slots]``. May be called from any thread; returns at once."""
        self._held = held.copy(), checksums

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10 * self._every)
        self._withdraw()

    def _run(self) -> None:
        told = ""
        while not self._stop.wait(self._every):
            try:
                self.look()
            except (EepError, OSError) as error:
                if str(error) != told:
                    logger.warning(
                        "rank %d could not show its experts to the backup, and tries again: %s", self._rank, error
                    )
                told = str(error)

    def look(self) -> None:
        """Offer what the services lack, or end an offer that they need no more."""
        if self._held is None:
            return
        held, checksums = self._held
        # Both rarely change, and decoding the records of a large model would cost the rank time.
        seen = (held, self._services.registry.scan(BACKUPS))
        if self._looked is not None and self._looked[0] is held and self._looked[1] == seen[1]:
            return
        self._compare(held, checksums)
        self._looked = seen

    def _compare(self, held: IntArray, checksums: Checksums) -> None:
        kept = np.zeros((held.shape[0], self._services.experts), dtype=bool)
        for backup in self._services.backups().values():
            kept |= backup.held
        offered = self._offered
        if offered is not None and not _lacking(offered, kept):
            self._withdraw()
            offered = None
        if not _lacking(held, kept):
            return
        # A copy and its record stay as they are until the services lack nothing of it.
        if offered is None or (self._shared is not None and not np.array_equal(offered, held)):
            self._offer(held, checksums)

    def _offer(self, held: IntArray, checksums: Checksums) -> None:
        if self._live is None:
            services, memory = self._services, self._shared or self._copied()
            self._live = LiveParameters(services.registry, services.transport, self._rank, 0, memory)
        slots, columns = held.shape[1], self._rank * held.shape[1]
        table = np.full((held.shape[0], columns + slots), EMPTY, dtype=np.int64)
        table[:, columns:] = held
        self._live.publish(self._memory.layout, Placement(table, self._services.experts, slots), checksums)
        self._offered = held

    def _copied(self) -> SharedMemory:
        size = self._memory.layout.region_bytes
        self._copy = SharedMemory.create(f"eep-experts-copy-{self._rank}", size)
        self._copy.bytes_at(0, size).copy_(self._memory.region[:size])
        return self._copy

    def _withdraw(self) -> None:
        if self._live is not None:
            self._live.withdraw()
        if self._copy is not None:
            self._copy.close()
        self._live = self._copy = self._offered = None


def _lacking(held: IntArray, kept: BoolArray) -> bool:
    """Whether there is an expert in ``held[layer, slot]`` that is not ``kept[layer, expert]``."""
    there = np.take_along_axis(kept, np.maximum(held, 0), axis=1)
    return bool(((held != EMPTY) & ~there).any())
