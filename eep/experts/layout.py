"""Where the bytes of an expert lie in the memory of its rank, and what their checksum is.

A rank keeps all its expert parameters in one region: for every layer and every tensor of an expert there is
one ``[slots, *shape]`` array, as fused kernels want it. All ranks have the same layout, so that a layer and a
slot say where to read on any of them, and no address ever travels between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import xxhash

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of one expert."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExpertLayout:
    """``layers`` times ``slots`` experts, each of ``tensors``, in one region."""

    layers: int
    slots: int
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if self.layers < 1 or self.slots < 1 or not self.tensors:
            raise ValueError("a layout needs at least one layer, one slot and one tensor per expert")
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            raise ValueError(f"tensor names must differ, got {[spec.name for spec in self.tensors]}")
        if any(spec.nbytes == 0 for spec in self.tensors):
            raise ValueError("an expert tensor without elements has nothing to repair; leave it out")

    @property
    def expert_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], int]:
        """The offset of each tensor's array within a layer, and the size of a layer."""
        starts, position = [], 0
        for spec in self.tensors:
            starts.append(position)
            position += -(-self.slots * spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        return tuple(starts), position

    @property
    def region_bytes(self) -> int:
        return self.layers * self._starts[1]

    def offset(self, layer: int, tensor: int) -> int:
        """Where the ``[slots, *shape]`` array of the tensor with that index begins."""
        if not (0 <= layer < self.layers and 0 <= tensor < len(self.tensors)):
            raise IndexError(f"no layer {layer} with tensor {tensor} in a layout of {self.layers} layers")
        return layer * self._starts[1] + self._starts[0][tensor]

    def pieces(self, layer: int, slot: int) -> list[tuple[int, int]]:
        """``(offset, length)`` of each tensor of the expert in ``slot``."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"no slot {slot} in a layout of {self.slots} slots")
        return [
            (self.offset(layer, index) + slot * spec.nbytes, spec.nbytes) for index, spec in enumerate(self.tensors)
        ]


class ExpertMemory:
    """The expert parameters of one rank: typed views for the model, bytes for repair, over one region.

    The region never moves, so neither do the parameters: a repaired expert is written where the old one was
    and captured graphs stay valid.
    """

    def __init__(self, layout: ExpertLayout, region: torch.Tensor) -> None:
        if region.dtype != torch.uint8 or region.dim() != 1 or not region.is_contiguous():
            raise ValueError("a region is a flat, contiguous tensor of bytes")
        if region.numel() < layout.region_bytes:
            raise ValueError(f"the layout needs {layout.region_bytes} bytes, the region has {region.numel()}")
        self.layout = layout
        self.region = region

    def tensors(self, layer: int) -> Mapping[str, torch.Tensor]:
        """The parameters of a layer by name, each ``[slots, *shape]``, for the model to compute with."""
        views = {}
        for index, spec in enumerate(self.layout.tensors):
            start = self.layout.offset(layer, index)
            array = self.region[start : start + self.layout.slots * spec.nbytes].view(spec.dtype)
            views[spec.name] = array.view(self.layout.slots, *spec.shape)
        return views

    def pieces(self, layer: int, slot: int) -> list[torch.Tensor]:
        """The bytes of the expert in ``slot``, one flat tensor for each of its tensors."""
        return [self.region[start : start + length] for start, length in self.layout.pieces(layer, slot)]

    def checksum(self, layer: int, slot: int) -> int:
        return checksum(self.pieces(layer, slot))


def checksum(pieces: list[torch.Tensor]) -> int:
    """XXH3 over the bytes of an expert, tensor after tensor."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece.cpu().numpy().data)
    return digest.intdigest()
