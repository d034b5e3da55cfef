"""Copies of rows that are chosen by number, between tensors of the same kind: many tensors at once."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

import torch

from eep.abi import native


class RowCopy:
    """From each of ``sources`` to its target. To look at many tensors takes longer than to copy a few rows of them: who
    copies between the same tensors again and again keeps this object.

    ValueError if tensors do not fit each other.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        pairs = list(zip(targets, sources, strict=True))
        for target, source in pairs:
            if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
                raise ValueError(f"rows {_described(source)} cannot be copied to rows {_described(target)}")
        self._tensors = [*targets, *sources]
        """They stay where they are for as long as this object is there."""
        self._devices = {each.device for each in self._tensors}
        if len(self._devices) > 1 or not all(each.is_contiguous() for each in self._tensors):
            raise ValueError("tensors whose rows are copied must be in one piece, and all on one device")
        self._to, self._from = (
            (ctypes.c_void_p * len(pairs))(*(pair[side].data_ptr() for pair in pairs)) for side in (0, 1)
        )
        self._sizes = (ctypes.c_uint64 * len(pairs))(*(target[:1].nbytes for target, _ in pairs))

    def __call__(self, to_rows: torch.Tensor, from_rows: torch.Tensor) -> None:
        """Row ``from_rows[i]`` of each source becomes row ``to_rows[i]`` of its target. On a GPU in the order of the stream.

        The caller has checked that there are such rows.
        """
        numbers = (to_rows, from_rows)
        if len(self._devices | {each.device for each in numbers}) > 1 or not all(
            map(torch.Tensor.is_contiguous, numbers)
        ):
            raise ValueError("the numbers of rows must be in one piece, and where the tensors are")
        if to_rows.dtype != torch.int64 or from_rows.dtype != torch.int64 or to_rows.shape != from_rows.shape:
            raise ValueError("the numbers of rows must be two lists of 64-bit integers, as long as each other")
        library = native.load(to_rows.device.type)
        on_gpu = to_rows.device.type == "cuda"
        with torch.cuda.device(to_rows.device) if on_gpu else contextlib.nullcontext():
            stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
            code = library.eep_copy_rows(
                *(len(self._sizes), self._to, self._from, self._sizes),
                *(to_rows.numel(), to_rows.data_ptr(), from_rows.data_ptr(), stream),
            )
        native.check(library, code)


def copy_rows(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], to_rows: torch.Tensor, from_rows: torch.Tensor
) -> None:
    """Once. See :class:`RowCopy`."""
    RowCopy(targets, sources)(to_rows, from_rows)


def _described(tensor: torch.Tensor) -> str:
    return f"of {tuple(tensor.shape[1:])} {tensor.dtype}"
