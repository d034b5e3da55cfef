"""Where each tensor of a safetensors checkpoint lies on disk: file, offset, length. Reads headers only.

The format is an 8-byte length, a JSON header of that length, and the bytes of the tensors. A header is input
from outside: its size is capped, and every tensor must lie within its file and be as long as its shape says.
"""

from __future__ import annotations

import json
import math
import pathlib
from dataclasses import dataclass

import torch

_MOST_HEADER_BYTES = 100_000_000  # the limit of the format's own library

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: pathlib.Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def index_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Every tensor in the ``*.safetensors`` files of ``directory``, by name."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors files; name the directory of a checkpoint")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise ValueError(f"tensor {name} is both in {tensors[name].file.name} and in {file.name}")
            tensors[name] = tensor
    return tensors


def _read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"{file} is not a safetensors file: its header cannot be {length} bytes long")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file} is not a safetensors file: its header is not JSON") from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = _DTYPES[entry["dtype"]], tuple(int(extent) for extent in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: the header entry of {name} cannot be understood: {entry}") from error
        if not 0 <= begin <= end <= size - 8 - length or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{file}: tensor {name} does not lie where its header says; the file is damaged")
        tensors[name] = StoredTensor(file, 8 + length + begin, end - begin, shape, dtype)
    return tensors
