"""What torch asks of a group's backend. A group that is made in Python has none below it, so it answers for itself.

Checkpoints and loaders of state look for the devices of a group. Coalesced calls are begun and ended by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from eep.errors import EepError
from eep.process_group.lane import Lane
from eep.process_group.work import EepWork
from eep.process_group.work_batch import WorkBatch


class OwnBackend:
    """Of a group that has one lane for each kind of device."""

    supports_splitting = False
    """Torch would make subgroups from the communicator of NCCL."""
    supports_coalescing = False
    """Calls need not be coalesced to run well here. Those that are, are."""
    supports_time_estimate = False
    supports_shrinking = False

    _lanes: Mapping[str, Lane]
    _coalesced: list[EepWork] | None = None
    """The works since calls began to be coalesced, if so."""

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._lanes]

    def _get_backend(self, device: torch.device | str) -> Self:
        if (kind := torch.device(device).type) not in self._lanes:
            raise EepError(
                f"this group takes tensors on {' and '.join(self._lanes)}, and has no backend for {kind}; see "
                "eep.pg.Options(devices=...)"
            )
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        """No call is faster with memory of the group's own."""
        return False

    def _start_coalescing(self, device: Any) -> None:
        self._get_backend(device)
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> WorkBatch:
        """All that was called since :meth:`_start_coalescing`. Torch drops the works of the calls themselves."""
        works, self._coalesced = self._coalesced, None
        if works is None:
            raise EepError("no calls are being coalesced")
        return WorkBatch(works)

    def _note(self, work: EepWork) -> EepWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work
