"""Copies of rows that are chosen by number, between tensors of the same kind: many tensors at once."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

import torch

from eep.abi import native


def copy_rows(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], to_rows: torch.Tensor, from_rows: torch.Tensor
) -> None:
    """Row ``from_rows[i]`` of each source becomes row ``to_rows[i]`` of its target. On a GPU in the order of the stream.

    ValueError if tensors do not fit each other. The caller has checked that there are such rows.
    """
    pairs = list(zip(targets, sources, strict=True))
    for target, source in pairs:
        if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
            raise ValueError(f"rows {_described(source)} cannot be copied to rows {_described(target)}")
    every = [*targets, *sources, to_rows, from_rows]
    if len({each.device for each in every}) != 1 or not all(each.is_contiguous() for each in every):
        raise ValueError("tensors whose rows are copied must be in one piece, and all on one device")
    if to_rows.dtype != torch.int64 or from_rows.dtype != torch.int64 or to_rows.shape != from_rows.shape:
        raise ValueError("the numbers of rows must be two lists of 64-bit integers, as long as each other")
    library = native.load(to_rows.device.type)
    to, from_ = ((ctypes.c_void_p * len(pairs))(*(pair[side].data_ptr() for pair in pairs)) for side in (0, 1))
    sizes = (ctypes.c_uint64 * len(pairs))(*(target[:1].nbytes for target, _ in pairs))
    on_gpu = to_rows.device.type == "cuda"
    with torch.cuda.device(to_rows.device) if on_gpu else contextlib.nullcontext():
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
        code = library.eep_copy_rows(
            *(len(pairs), to, from_, sizes, to_rows.numel(), to_rows.data_ptr(), from_rows.data_ptr(), stream)
        )
    native.check(library, code)


def _described(tensor: torch.Tensor) -> str:
    return f"of {tuple(tensor.shape[1:])} {tensor.dtype}"
