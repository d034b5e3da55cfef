"""Checks that the calls of DeepEP's interface make before they change anything."""

from __future__ import annotations

import os

import torch

from eep.abi.native import MAX_TOPK, SCALE_GROUP
from eep.errors import EepError


def local_experts_of(num_experts: int, num_ranks: int) -> int:
    """How many experts each rank has."""
    if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of the number of ranks, {num_ranks}; got {num_experts}"
        )
    return num_experts // num_ranks


def device_of(name: str, tensor: torch.Tensor) -> torch.device:
    """Where the tensor of a call is."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    return tensor.device


def check_handle(handle: object, length: int) -> None:
    """That this can be the handle of a dispatch that returns one of that length."""
    if not isinstance(handle, tuple | list) or len(handle) != length:
        raise TypeError(
            f"handle must be what a dispatch returned, with {length} parts, got {type(handle).__name__}"
            + (f" of {len(handle)}" if isinstance(handle, tuple | list) else "")
        )


def check_tensor(device: torch.device, name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Checks type, sizes (None for any), device and strides of an argument."""
    where = device_of(name, tensor)
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    sizes = [got if want is None else want for want, got in zip(shape, tensor.shape, strict=False)]
    if len(shape) != tensor.dim() or sizes != list(tensor.shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be of shape [{wanted}], got {list(tensor.shape)}")
    if where.type != device.type or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on {device.type}; copy it there, or call .contiguous() on it")


def check_choices(topk: int) -> None:
    """That a token can have so many choices."""
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"top-k must be between 1 and {MAX_TOPK}, got {topk}")


def check_scaled(hidden: int) -> None:
    """That tokens of this size can travel as fp8."""
    if hidden % SCALE_GROUP:
        raise ValueError(
            f"fp8 has one scale for {SCALE_GROUP} values: the hidden size must be a multiple of {SCALE_GROUP}, got "
            f"{hidden}; pass use_fp8=False"
        )


def refuse(is_used: bool, name: str, instead: str) -> None:
    """Raises for an option of DeepEP that this package does not have; ``instead`` says what to do."""
    if is_used:
        raise EepError(f"eep.compat.deep_ep does not support {name}; {instead}")


def number_of(variable: str) -> int:
    """The number in a variable of the environment, for a process that joins."""
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise ValueError(f"a process that joins needs a number in the environment variable {variable}; it is {value!r}")
    return int(value)


def timeout_of(given: float | None, default: float) -> float:
    """How long a rank is waited for, in milliseconds: as given, or as the environment says."""
    value, name = given, "timeout_ms"
    if given is None:
        name = "EEP_TIMEOUT_MS"
        try:
            value = float(os.environ.get(name, default))
        except ValueError as error:
            raise ValueError(f"{name} must be a number of milliseconds, got {os.environ[name]!r}") from error
    if value is None or not 0 < value < 1e9:
        raise ValueError(f"{name} must be positive, got {value}")
    return value


def is_gpu_shared(given: bool | None) -> bool:
    """Whether other ranks run on the GPU of this one: as given, or as the environment says."""
    if given is not None:
        return given
    value = os.environ.get("EEP_SHARES_GPU", "0")
    if value not in ("0", "1"):
        raise ValueError(f"EEP_SHARES_GPU must be 1, where ranks share a GPU, or 0, got {value!r}")
    return value == "1"


def check_destroy(explicitly_destroy: bool) -> None:
    """That the caller has said, when it made the buffer, that it would call ``destroy()``."""
    if not explicitly_destroy:
        raise EepError(
            "destroy() needs a buffer made with explicitly_destroy=True; this one frees its memory by itself"
        )
