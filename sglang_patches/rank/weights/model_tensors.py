"""The tensors of a model: found, laid out in one region, moved there, and given to a model that was built without memory.

Tensors that show the same memory (tied weights, views) do so afterwards, too: what is laid out is their storages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec
import torch
import xxhash
from torch.overrides import TorchFunctionMode

_ALIGNED = 512
LARGE = 1 << 16
"""Bytes. A smaller tensor gets its memory also in a model that is built without."""
_OF_TORCH = {"training"}


class Unfit(Exception):
    """What was kept does not fit the model."""


class StorageEntry(msgspec.Struct, frozen=True):
    """A stretch of the region."""

    start: int
    size: int
    checksum: int


class TensorEntry(msgspec.Struct, frozen=True):
    """``name`` of ``module`` (a path) shows part of a storage."""

    module: str
    name: str
    storage: int
    offset: int
    """In elements, as for torch."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class TensorList(msgspec.Struct, frozen=True):
    storages: tuple[StorageEntry, ...]
    tensors: tuple[TensorEntry, ...]

    @property
    def region_bytes(self) -> int:
        return max((_aligned(each.start + each.size) for each in self.storages), default=_ALIGNED)

    @property
    def digest(self) -> str:
        """Two regions with the same digest hold the same."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self))


def find_tensors(model: torch.nn.Module, left_out: Collection[int]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Path, name and tensor of all that modules have by name, but for storages at the addresses ``left_out``."""
    for path, module in model.named_modules():
        for owned in (module._parameters, module._buffers, vars(module)):
            for name, tensor in owned.items():
                if isinstance(tensor, torch.Tensor) and tensor.numel() and _address(tensor) not in left_out:
                    yield path, name, tensor


def find_scalars(model: torch.nn.Module) -> dict[str, dict[str, float | bool]]:
    """What modules have read off the weights when these were loaded is among these. Whole numbers are not: they are sizes,
    which a model without memory has too, or addresses."""
    return {
        path: {
            name: each for name, each in vars(module).items() if type(each) in (float, bool) and name not in _OF_TORCH
        }
        for path, module in model.named_modules()
    }


def lay_out(model: torch.nn.Module, left_out: Collection[int], device: str) -> TensorList:
    """Unfit if a tensor is on another device: then it might be a copy of a weight that the list would not have."""
    storages: dict[int, int] = {}
    places: list[StorageEntry] = []
    tensors, position = [], 0
    for path, name, tensor in find_tensors(model, left_out):
        if tensor.device.type != device:
            raise Unfit(f"{_full(path, name)} is on {tensor.device}, and the model on {device}")
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = len(places)
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            places.append(StorageEntry(position, storage.nbytes(), checksum_of(content)))
            position += _aligned(storage.nbytes())
        tensors.append(
            TensorEntry(
                path,
                name,
                storages[storage.data_ptr()],
                int(tensor.storage_offset()),
                tuple(tensor.shape),
                tensor.stride(),
                str(tensor.dtype).removeprefix("torch."),
            )
        )
    return TensorList(tuple(places), tuple(tensors))


def fill(listed: TensorList, region: torch.Tensor, model: torch.nn.Module) -> None:
    """Copy what the tensors of a model show to where the list has it."""
    modules, done = dict(model.named_modules()), set()
    for each in listed.tensors:
        if each.storage not in done:
            done.add(each.storage)
            storage = _tensor_of(modules[each.module], each.name).untyped_storage()
            place = listed.storages[each.storage]
            content = torch.empty(0, dtype=torch.uint8, device=region.device).set_(storage)
            region[place.start : place.start + place.size].copy_(content)


def verify(listed: TensorList, region: torch.Tensor) -> None:
    """Unfit if the region does not hold what the list says."""
    for number, each in enumerate(listed.storages):
        if checksum_of(region[each.start : each.start + each.size]) != each.checksum:
            names = [_full(tensor.module, tensor.name) for tensor in listed.tensors if tensor.storage == number]
            raise Unfit(f"{', '.join(names)} is not as it was loaded")


def bind(listed: TensorList, region: torch.Tensor, model: torch.nn.Module) -> None:
    """Have the tensors of a model show the region. Unfit if a tensor is left without memory."""
    modules = dict(model.named_modules())
    for each in listed.tensors:
        if each.module not in modules:
            raise Unfit(f"the model has no module {each.module}")
        place, dtype = listed.storages[each.storage], getattr(torch, each.dtype)
        content = region[place.start : place.start + place.size // dtype.itemsize * dtype.itemsize].view(dtype)
        shown = content.as_strided(each.shape, each.stride, content.storage_offset() + each.offset)
        give(modules[each.module], each.name, shown)
    hollow = [_full(path, name) for path, name, tensor in find_tensors(model, ()) if tensor.is_meta]
    if hollow:
        raise Unfit(f"{', '.join(hollow[:5])} of {len(hollow)} tensors have no memory")


def give(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Have a tensor of a module, with memory or without, show the memory of another. A parameter stays the same object, with
    the attributes that its loader has given it."""
    parameter = module._parameters.get(name)
    if parameter is not None and parameter.is_meta:
        filled = torch.Tensor._make_subclass(type(parameter), tensor, parameter.requires_grad)
        filled.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, filled)  # type: ignore[no-untyped-call]
    elif parameter is not None:
        parameter.data = tensor
    elif name in module._buffers:
        module._buffers[name] = tensor
    elif isinstance(vars(module).get(name), torch.Tensor):
        vars(module)[name] = tensor
    else:
        raise Unfit(f"{type(module).__name__} has no tensor {name}")


class WithoutMemory(TorchFunctionMode):
    """What is made in this context to be filled later has a shape and no memory, unless it is small."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.empty and not named.get("pin_memory"):
            hollow = func(*args, **{**named, "device": "meta"})
            if hollow.nbytes >= LARGE:
                return hollow
        return func(*args, **named)


def checksum_of(content: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(content.cpu().numpy().data)


def _tensor_of(module: torch.nn.Module, name: str) -> torch.Tensor:
    for owned in (module._parameters, module._buffers, vars(module)):
        if isinstance(tensor := owned.get(name), torch.Tensor):
            return tensor
    raise Unfit(f"{type(module).__name__} has no tensor {name}")


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNED) * _ALIGNED
