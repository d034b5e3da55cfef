"""The experts of a checkpoint on disk: the last source of a repair, and one way to fill a backup.

A read takes only the bytes of the wanted expert, by offset. It delivers the bytes of the checkpoint, gate before
up. If the model was quantised or reordered when it was loaded, its checksums do not match, and repair says so.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eep.experts.checkpoint.families import FAMILIES, CheckpointFamily, compile_pattern, detect_family
from eep.experts.checkpoint.safetensors_index import StoredTensor, index_tensors
from eep.experts.layout import ExpertLayout, TensorSpec
from eep.experts.repair.reader import SourceLost, Want


@dataclass(frozen=True, slots=True)
class _Segment:
    """A run of bytes in a file."""

    file: pathlib.Path
    offset: int
    nbytes: int


class CheckpointReader:
    """Reads single experts of the checkpoint in ``directory``. A source for repair.

    The layers of the placement are the layers of the model that have experts, in order; ``layers`` names them
    where that is not right (a checkpoint may hold the experts of a draft model too).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        family: str | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.directory = pathlib.Path(directory)
        stored = index_tensors(self.directory)
        if family is not None and family not in FAMILIES:
            raise ValueError(f"unknown model family {family!r}; known are {', '.join(FAMILIES)}")
        self.family = FAMILIES[family] if family else detect_family(stored)
        found = _find(stored, self.family)
        present = sorted({layer for layer, _, _ in found})
        chosen = list(present if layers is None else layers)
        if not chosen or not set(chosen) <= set(present):
            raise ValueError(f"layers {chosen} were asked for, but the checkpoint has experts in layers {present}")
        self._layers = chosen
        self.experts = 1 + max(expert for layer, expert, _ in found if layer in set(chosen))
        self._names = [name for name in self.family.tensors if (chosen[0], 0, name) in found]
        self._found = found
        self._check_complete()

    def layout(self, slots: int) -> ExpertLayout:
        """The layout of a rank that holds the experts as they are in the checkpoint."""
        specs = []
        for name in self._names:
            parts = self._found[self._layers[0], 0, name]
            rows = [part.shape for part, _ in parts]
            shape = rows[0] if len(rows) == 1 else (sum(row[0] for row in rows), *rows[0][1:])
            specs.append(TensorSpec(name, shape, parts[0][0].dtype))
        return ExpertLayout(len(self._layers), slots, tuple(specs))

    def alive(self) -> bool:
        return True

    def read(self, wants: Sequence[Want]) -> None:
        for want in wants:
            if len(want.into) != len(self._names):
                raise SourceLost(
                    f"the checkpoint has {self._names} for an expert, the model has {len(want.into)} tensors: "
                    "the model was converted when it was loaded"
                )
            for name, target in zip(self._names, want.into, strict=True):
                segments = self._segments(want.layer, want.expert, name)
                if sum(segment.nbytes for segment in segments) != target.numel():
                    raise SourceLost(f"{name} has another size in the checkpoint than in the model")
                _read(segments, target)

    def _segments(self, layer: int, expert: int, name: str) -> list[_Segment]:
        return [segment for _, segment in self._found[self._layers[layer], expert, name]]

    def _check_complete(self) -> None:
        first = {
            name: [(part.shape, part.dtype) for part, _ in self._found[self._layers[0], 0, name]]
            for name in self._names
        }
        for layer in self._layers:
            for expert in range(self.experts):
                for name in self._names:
                    parts = self._found.get((layer, expert, name))
                    if parts is None or [(part.shape, part.dtype) for part, _ in parts] != first[name]:
                        raise ValueError(
                            f"{name} of expert {expert} in layer {layer} is missing from the checkpoint, "
                            "or unlike the others: download it again, or name the layers to use"
                        )


def _find(
    stored: dict[str, StoredTensor], family: CheckpointFamily
) -> dict[tuple[int, int, str], list[tuple[StoredTensor, _Segment]]]:
    """For each (layer, expert, tensor): its parts in order, each as one expert's share of a stored tensor."""
    found: dict[tuple[int, int, str], list[tuple[StoredTensor, _Segment]]] = {}
    for ours, patterns in family.tensors.items():
        for position, pattern in enumerate(patterns):
            expression = compile_pattern(pattern)
            for name, tensor in stored.items():
                match = expression.fullmatch(name)
                if match is None:
                    continue
                for expert, part, segment in _per_expert(tensor, match.groupdict().get("expert")):
                    parts = found.setdefault((int(match["layer"]), expert, ours), [])
                    # A part that is missing, or there twice, leaves a list of the wrong length.
                    if len(parts) == position:
                        parts.append((part, segment))
    return {key: parts for key, parts in found.items() if len(parts) == len(family.tensors[key[2]])}


def _per_expert(tensor: StoredTensor, expert: str | None) -> list[tuple[int, StoredTensor, _Segment]]:
    if expert is not None:
        return [(int(expert), tensor, _Segment(tensor.file, tensor.offset, tensor.nbytes))]
    if len(tensor.shape) < 2 or not tensor.shape[0]:
        raise ValueError(f"a fused expert tensor of shape {tensor.shape} in {tensor.file} has no experts in it")
    number, size = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    share = StoredTensor(tensor.file, tensor.offset, size, tensor.shape[1:], tensor.dtype)
    return [(e, share, _Segment(tensor.file, tensor.offset + e * size, size)) for e in range(number)]


def _read(segments: Sequence[_Segment], target: torch.Tensor) -> None:
    """Fill ``target`` with the segments, one after the other."""
    # Files can be read into host memory only; elsewhere the bytes take one step more.
    host = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
    buffer = host.numpy().data
    position = 0
    for segment in segments:
        try:
            descriptor = os.open(segment.file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < segment.nbytes:
                    part = buffer[position + done : position + segment.nbytes]
                    count = os.preadv(descriptor, [part], segment.offset + done)
                    if not count:
                        raise SourceLost(
                            f"{segment.file.name} is shorter than when it was indexed: it has been changed"
                        )
                    done += count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SourceLost(f"{segment.file.name} cannot be read: {error}") from error
        position += segment.nbytes
    if host is not target:
        target.copy_(host)
