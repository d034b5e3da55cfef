"""One collective: its arguments for the native library, and the memory behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eep.abi.collectives import CollectiveArgs

_OVERLAPS = 1
"""What torch says of a tensor whose elements share memory."""


@dataclass(slots=True)
class Call:
    """Its name for messages, its native arguments, and what must live as long as it runs.

    The native library takes tensors whose elements lie in their order, without gaps. Any other has a stand-in: a copy of it,
    which is what is read and written.
    """

    name: str
    args: CollectiveArgs
    tensors: list[torch.Tensor]
    """The caller's."""
    keep: list[Any] = field(default_factory=list)
    written: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """Tensors that are written through a stand-in, with it."""

    def reads(self, tensor: torch.Tensor) -> int:
        """The address from which this tensor can be read."""
        if tensor.is_contiguous():
            return tensor.data_ptr()
        stand_in = tensor.detach().contiguous()
        self.keep.append(stand_in)
        return stand_in.data_ptr()

    def writes(self, tensor: torch.Tensor) -> int:
        """The address at which this tensor is read and written."""
        if tensor.is_contiguous():
            return tensor.data_ptr()
        if torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
            raise ValueError(
                f"{self.name}: elements of a tensor that is written share memory, as after .expand(); call "
                ".contiguous() on it"
            )
        # With what the tensor has now: blocks of ranks that are not there keep it.
        stand_in = tensor.detach().contiguous()
        self.written += ((tensor, stand_in),)
        return stand_in.data_ptr()

    def finish(self) -> None:
        """The call went well: what stand-ins got goes where it belongs."""
        for tensor, stand_in in self.written:
            tensor.detach().copy_(stand_in)  # a parameter too, which torch lets no one else write


def check(name: str, *tensors: torch.Tensor) -> None:
    """That these are tensors whose memory can be handed to the native library, or that of a stand-in."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} takes tensors, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: the eep backend does not support {tensor.layout} tensors; call .to_dense()")
        if not tensor.is_cpu and not tensor.is_contiguous():  # a kernel that was captured knows no stand-in
            raise ValueError(f"{name}: tensors must be contiguous; call .contiguous() on this one")
        if tensor is not tensors[0] and tensor.device != tensors[0].device:
            raise ValueError(f"{name}: tensors must be on one device, got {tensors[0].device} and {tensor.device}")


def check_alike(name: str, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """That these have one type and one size."""
    for other in others:
        if other.dtype != tensor.dtype:
            raise TypeError(f"{name}: tensors must be of one type, got {tensor.dtype} and {other.dtype}")
        if other.numel() != tensor.numel():
            raise ValueError(f"{name}: tensors must be of one size, got {tensor.numel()} and {other.numel()} elements")
