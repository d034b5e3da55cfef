"""A checkpoint whose experts may be stored in another type than they are served in, or transposed, and are converted when
read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from eep.experts.checkpoint.checkpoint_reader import CheckpointReader
from eep.experts.layout import ExpertLayout
from eep.experts.repair.reader import Reader, Want


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as a source of experts as they are served."""

    reader: Reader
    layout: ExpertLayout
    """Of a rank with one slot."""
    experts: int


def open_checkpoint(
    directory: str | os.PathLike[str],
    family: str | None = None,
    layers: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> Checkpoint:
    """``dtypes``: the types in which kernels are served with the tensors of an expert; None if these are wanted as stored.

    Raises ValueError or OSError if the checkpoint does not give experts of these types.
    """
    reader = CheckpointReader(directory, family, layers)
    stored = reader.layout(1)
    if dtypes is None:
        return Checkpoint(reader, stored, reader.experts)
    if len(dtypes) != len(stored.tensors):
        raise ValueError(f"an expert has {len(stored.tensors)} tensors in the checkpoint, {len(dtypes)} in the model")
    turned = reader.family.transposed
    tensors = tuple(
        replace(spec, dtype=dtype, shape=spec.shape[::-1] if spec.name in turned else spec.shape)
        for spec, dtype in zip(stored.tensors, dtypes, strict=True)
    )
    wanted = ExpertLayout(stored.layers, 1, tensors)
    if wanted == stored and not any(spec.name in turned for spec in tensors):
        return Checkpoint(reader, stored, reader.experts)
    return Checkpoint(ConvertedReader(reader, stored, wanted, turned), wanted, reader.experts)


class ConvertedReader:
    """Reads what ``stored`` describes and gives what ``wanted`` describes: another floating type, and the matrices that
    ``transposed`` names transposed."""

    def __init__(
        self, reader: Reader, stored: ExpertLayout, wanted: ExpertLayout, transposed: frozenset[str] = frozenset()
    ) -> None:
        for theirs, ours in zip(stored.tensors, wanted.tensors, strict=True):
            shape = theirs.shape[::-1] if theirs.name in transposed else theirs.shape
            if shape != ours.shape or not (theirs.dtype.is_floating_point and ours.dtype.is_floating_point):
                raise ValueError(
                    f"{theirs.name} is {theirs.dtype} {theirs.shape} on disk, {ours.dtype} {ours.shape} in the model"
                )
        self._reader, self._stored, self._wanted, self._transposed = reader, stored, wanted, transposed

    def alive(self) -> bool:
        return self._reader.alive()

    def read(self, wants: Sequence[Want]) -> None:
        for want in wants:
            aside = [torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu") for spec in self._stored.tensors]
            self._reader.read([Want(want.layer, want.expert, want.slot, aside)])
            for raw, target, theirs, ours in zip(
                aside, want.into, self._stored.tensors, self._wanted.tensors, strict=True
            ):
                read = raw.view(theirs.dtype).view(theirs.shape)
                turned = read.t() if theirs.name in self._transposed else read
                target.view(ours.dtype).view(ours.shape).copy_(turned)
