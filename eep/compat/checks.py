"""What the calls of DeepEP's interface check before they change anything."""

from __future__ import annotations

import os

import torch

from eep.errors import EepError


def local_experts_of(num_experts: int, num_ranks: int) -> int:
    """How many experts each rank has."""
    if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks:
        raise ValueError(f"num_experts must be a multiple of the {num_ranks} ranks, got {num_experts}")
    return num_experts // num_ranks


def check_tensor(device: torch.device, name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Type, sizes (None for any), device and strides of an argument."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    sizes = [got if want is None else want for want, got in zip(shape, tensor.shape, strict=False)]
    if len(shape) != tensor.dim() or sizes != list(tensor.shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be of shape [{wanted}], got {list(tensor.shape)}")
    if tensor.device.type != device.type or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on {device.type}; copy it there, or call .contiguous() on it")


def refuse(is_used: bool, name: str, instead: str) -> None:
    """Says of an option that DeepEP has and this package has not, what to do instead."""
    if is_used:
        raise EepError(f"{name} is not supported by eep.compat.deep_ep; {instead}")


def number_of(variable: str) -> int:
    """What the environment tells a process that joins."""
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise ValueError(f"a process that joins needs a number in {variable} of the environment, got {value!r}")
    return int(value)
