"""Tensors in, arguments of the native collectives out. Everything is checked here, before anything is told of it.

Bad input raises ``ValueError`` or ``TypeError`` and changes nothing. Launches nothing.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.distributed import ReduceOp

from eep.abi.collectives import CollectiveArgs, Element, Kind, Reduction
from eep.process_group.call import Call, check, check_alike

_ELEMENTS = {
    torch.uint8: Element.U8,
    torch.int8: Element.I8,
    torch.uint16: Element.U16,
    torch.int16: Element.I16,
    torch.uint32: Element.U32,
    torch.int32: Element.I32,
    torch.uint64: Element.U64,
    torch.int64: Element.I64,
    torch.float16: Element.F16,
    torch.bfloat16: Element.BF16,
    torch.float32: Element.F32,
    torch.float64: Element.F64,
    torch.bool: Element.BOOL,
}
_REDUCTIONS = {
    # By number: torch makes a new object for each look at an operator, and compares those slowly.
    operator.index(op): reduction  # type: ignore[arg-type]
    for op, reduction in (
        (ReduceOp.SUM, Reduction.SUM),
        (ReduceOp.AVG, Reduction.AVG),
        (ReduceOp.MIN, Reduction.MIN),
        (ReduceOp.MAX, Reduction.MAX),
        (ReduceOp.PRODUCT, Reduction.PROD),
        (ReduceOp.BAND, Reduction.BAND),
        (ReduceOp.BOR, Reduction.BOR),
        (ReduceOp.BXOR, Reduction.BXOR),
    )
}
_BITWISE = (Reduction.BAND, Reduction.BOR, Reduction.BXOR)
_BY_PARTS = (operator.index(ReduceOp.SUM), operator.index(ReduceOp.AVG))  # type: ignore[arg-type]
"""Operators that do with complex numbers what they do with their parts."""


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    known = _REDUCTIONS.get(operator.index(getattr(op, "op", op)))
    if known is None:
        raise ValueError(f"the eep backend cannot reduce with {op}; it knows {', '.join(r.name for r in Reduction)}")
    if dtype not in _ELEMENTS:
        raise TypeError(f"the eep backend cannot reduce tensors of {dtype}; convert them first")
    if known in _BITWISE and dtype.is_floating_point:
        raise ValueError(f"{known.name} needs integers, got {dtype}")
    return known


def barrier() -> Call:
    return Call("barrier", CollectiveArgs(kind=Kind.BARRIER, element=Element.BYTES), [])


def broadcast(tensor: torch.Tensor, root: int) -> Call:
    check("broadcast", tensor)
    call = Call("broadcast", _args(Kind.BROADCAST, tensor, root=root), [tensor])
    call.args.in_ = call.args.out = call.writes(tensor)
    return call


def all_reduce(tensor: torch.Tensor, op: Any) -> Call:
    check("all_reduce", tensor)
    numbers = _numbers(tensor, op)
    call = Call("all_reduce", _args(Kind.ALL_REDUCE, numbers, reduction_of(op, numbers.dtype)), [tensor])
    call.args.in_ = call.args.out = call.writes(numbers)
    return call


def reduce(tensor: torch.Tensor, op: Any, root: int) -> Call:
    check("reduce", tensor)
    numbers = _numbers(tensor, op)
    call = Call("reduce", _args(Kind.REDUCE, numbers, reduction_of(op, numbers.dtype), root), [tensor])
    call.args.in_ = call.args.out = call.writes(numbers)
    return call


def reduce_into(output: torch.Tensor | None, tensor: torch.Tensor, op: Any, root: int) -> Call:
    """``output`` is None anywhere but at the root."""
    check("reduce", tensor, *([] if output is None else [output]))
    numbers = _numbers(tensor, op)
    call = Call("reduce", _args(Kind.REDUCE, numbers, reduction_of(op, numbers.dtype), root), [tensor])
    call.args.in_ = call.reads(numbers)
    call.args.out = None if output is None else call.writes(_numbers(output, op))
    return call


def all_gather(outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Call:
    check("all_gather", tensor, *outputs)
    check_alike("all_gather", tensor, outputs)
    call = Call("all_gather", _args(Kind.ALL_GATHER, tensor), [tensor, *outputs])
    call.args.in_ = call.reads(tensor)
    call.args.out_blocks = _written(call, outputs)
    return call


def gather(outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Call:
    """``outputs`` is empty anywhere but at the root."""
    check("gather", tensor, *outputs)
    check_alike("gather", tensor, outputs)
    call = Call("gather", _args(Kind.GATHER, tensor, root=root), [tensor, *outputs])
    call.args.in_ = call.reads(tensor)
    call.args.out_blocks = _written(call, outputs)
    return call


def scatter(tensor: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Call:
    """``inputs`` is empty anywhere but at the root."""
    check("scatter", tensor, *inputs)
    check_alike("scatter", tensor, inputs)
    call = Call("scatter", _args(Kind.SCATTER, tensor, root=root), [tensor, *inputs])
    call.args.out = call.writes(tensor)
    call.args.in_blocks = _read(call, inputs)
    return call


def reduce_scatter(tensor: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any) -> Call:
    check("reduce_scatter", tensor, *inputs)
    check_alike("reduce_scatter", tensor, inputs)
    numbers = _numbers(tensor, op)
    args = _args(Kind.REDUCE_SCATTER, numbers, reduction_of(op, numbers.dtype))
    call = Call("reduce_scatter", args, [tensor, *inputs])
    args.out = call.writes(numbers)
    args.in_blocks = _read(call, [_numbers(each, op) for each in inputs])
    return call


def all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Call:
    check("all_to_all", *outputs, *inputs)
    dtypes = {tensor.dtype for tensor in (*outputs, *inputs)}
    if len(dtypes) > 1:
        raise TypeError(f"all_to_all needs tensors of one type, got {', '.join(sorted(map(str, dtypes)))}")
    args = CollectiveArgs(kind=Kind.ALL_TO_ALL, element=_element(outputs[0]))
    call = Call("all_to_all", args, [*outputs, *inputs])
    args.in_blocks, args.out_blocks = _read(call, inputs), _written(call, outputs)
    sizes = tuple((ctypes.c_uint64 * len(blocks))(*map(_bytes, blocks)) for blocks in (inputs, outputs))
    args.in_bytes, args.out_bytes = sizes
    call.keep += sizes
    return call


# ---- tensors that hold a block for each of ``count`` ranks ----


def all_gather_single(output: torch.Tensor, tensor: torch.Tensor, count: int) -> Call:
    check("all_gather", tensor, output)
    call = Call("all_gather", _args(Kind.ALL_GATHER, tensor), [tensor, output])
    call.args.in_ = call.reads(tensor)
    call.args.out_blocks = _blocks(call, output, tensor, count, call.writes(output))
    return call


def reduce_scatter_single(output: torch.Tensor, tensor: torch.Tensor, op: Any, count: int) -> Call:
    check("reduce_scatter", output, tensor)
    numbers = _numbers(output, op)
    args = _args(Kind.REDUCE_SCATTER, numbers, reduction_of(op, numbers.dtype))
    call = Call("reduce_scatter", args, [output, tensor])
    args.out = call.writes(numbers)
    args.in_blocks = _blocks(call, tensor, output, count, call.reads(_numbers(tensor, op)))
    return call


def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    count: int,
) -> Call:
    """Tensors are cut along their first dimension: as the splits say, or equally if there are none."""
    check("all_to_all_single", output, tensor)
    if output.dtype != tensor.dtype:
        raise TypeError(f"all_to_all_single needs tensors of one type, got {output.dtype} and {tensor.dtype}")
    args = CollectiveArgs(kind=Kind.ALL_TO_ALL, element=_element(output))
    call = Call("all_to_all", args, [output, tensor])
    args.in_blocks, args.in_bytes = given = _splits(
        "all_to_all_single", tensor, input_splits, count, call.reads(tensor)
    )
    args.out_blocks, args.out_bytes = got = _splits(
        "all_to_all_single", output, output_splits, count, call.writes(output)
    )
    call.keep += [given, got]
    return call


def _blocks(call: Call, whole: torch.Tensor, part: torch.Tensor, count: int, begin: int) -> Any:
    """The addresses of ``count`` blocks of ``whole``, which is at ``begin``, each of the size of ``part``."""
    name = call.name
    if whole.dtype != part.dtype:
        raise TypeError(f"{name}: tensors must be of one type, got {part.dtype} and {whole.dtype}")
    size = part.numel()
    if whole.numel() != size * count:
        raise ValueError(
            f"{name}: {whole.numel()} elements are not {count} blocks of {size}, one for each rank of the group"
        )
    step = size * part.element_size()
    return _kept(call, [begin + step * i for i in range(count)])


def _splits(name: str, tensor: torch.Tensor, sizes: Sequence[int], count: int, begin: int) -> tuple[Any, Any]:
    """The addresses and the sizes in bytes of what goes to, or comes from, each rank. The tensor is at ``begin``."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % count:
            raise ValueError(
                f"{name}: a first dimension of {rows} cannot be divided among {count} ranks; give split sizes"
            )
        sizes = [rows // count] * count
    elif len(sizes) != count or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"{name}: split sizes {list(sizes)} do not divide a first dimension of {rows} among {count} ranks"
        )
    row_bytes = _bytes(tensor) // rows if rows else 0
    in_bytes = [size * row_bytes for size in sizes]
    addresses = accumulate(in_bytes[:-1], initial=begin)
    return (ctypes.c_void_p * count)(*addresses), (ctypes.c_uint64 * count)(*in_bytes)


def _numbers(tensor: torch.Tensor, op: Any) -> torch.Tensor:
    """What is reduced: the tensor itself, or the parts of its complex numbers."""
    if tensor.is_complex() and operator.index(getattr(op, "op", op)) in _BY_PARTS:
        return torch.view_as_real(tensor.detach())
    return tensor


def _args(kind: Kind, tensor: torch.Tensor, reduction: Reduction = Reduction.SUM, root: int = 0) -> CollectiveArgs:
    return CollectiveArgs(kind=kind, element=_element(tensor), reduction=reduction, root=root, bytes=_bytes(tensor))


def _element(tensor: torch.Tensor) -> Element:
    return _ELEMENTS.get(tensor.dtype, Element.BYTES)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes


def _read(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    return _kept(call, [call.reads(tensor) for tensor in tensors])


def _written(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    return _kept(call, [call.writes(tensor) for tensor in tensors])


def _kept(call: Call, addresses: list[int]) -> Any:
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    call.keep.append(pointers)
    return pointers
