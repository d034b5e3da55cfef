"""A checkpoint whose experts are kept in another type than they are served in: converted as they were when they were loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eep.experts.layout import ExpertLayout
from eep.experts.repair import Reader, Want


class ConvertedReader:
    """Reads what ``stored`` describes and gives what ``wanted`` describes: the same shapes, another floating type."""

    def __init__(self, reader: Reader, stored: ExpertLayout, wanted: ExpertLayout) -> None:
        for theirs, ours in zip(stored.tensors, wanted.tensors, strict=True):
            if theirs.shape != ours.shape or not (theirs.dtype.is_floating_point and ours.dtype.is_floating_point):
                raise ValueError(f"{theirs.name} is {theirs.dtype} {theirs.shape}, {ours.dtype} {ours.shape} is wanted")
        self._reader, self._stored, self._wanted = reader, stored, wanted

    def alive(self) -> bool:
        return self._reader.alive()

    def read(self, wants: Sequence[Want]) -> None:
        for want in wants:
            aside = [torch.empty(spec.nbytes, dtype=torch.uint8) for spec in self._stored.tensors]
            self._reader.read([Want(want.layer, want.expert, want.slot, aside)])
            for raw, target, theirs, ours in zip(
                aside, want.into, self._stored.tensors, self._wanted.tensors, strict=True
            ):
                target.view(ours.dtype).copy_(raw.view(theirs.dtype))
