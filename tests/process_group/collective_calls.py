"""One collective each, by its name, on values that depend on the rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

MOVES = ("broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all", "all_to_all_single")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
UNEVEN = "reduce_scatter_uneven"
"""A name like those above, for blocks that differ in size."""
# Torch has renamed these.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
COLLECTIVES = (*MOVES, *REDUCTIONS, "barrier")


def values(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` contributes: small whole numbers, whose sums and products are exact in every type."""
    random = torch.Generator().manual_seed(seed * 1000 + rank)
    return torch.randint(1, 4, shape, generator=random).to(dtype)


def lay_transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same, its elements in the reverse order of dimensions."""
    backwards = tuple(reversed(range(tensor.dim())))
    return tensor.permute(backwards).contiguous().permute(backwards)


def lay_strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same, with gaps: each element is in the middle of three."""
    wide = torch.full((*tensor.shape, 3), 7, dtype=tensor.dtype, device=tensor.device)
    wide[..., 1] = tensor
    return wide[..., 1]


LAYOUTS = {"contiguous": torch.Tensor.contiguous, "transposed": lay_transposed, "strided": lay_strided}


def run_collective(
    name: str,
    group: Any,
    rank: int,
    size: int,
    seed: int,
    shape: tuple[int, ...] = (5,),
    dtype: torch.dtype = torch.float32,
    op: Any = None,
    root: int = 0,
    device: str = "cpu",
    layout: str = "contiguous",
) -> list[torch.Tensor]:
    """One collective on contributions that depend on ``seed`` and rank only; what this rank holds afterwards."""
    op = dist.ReduceOp.SUM if op is None else op
    lay = LAYOUTS[layout]
    mine = lay(values(seed, rank, shape, dtype).to(device))
    blocks = [lay(values(seed + 7, rank * size + i, shape, dtype).to(device)) for i in range(size)]
    empty = [lay(torch.full(shape, 9, dtype=dtype, device=device)) for _ in range(size)]
    match name:
        case "broadcast":
            dist.broadcast(mine, group=group, group_src=root)
            return [mine]
        case "all_reduce":
            dist.all_reduce(mine, op, group=group)
            return [mine]
        case "reduce":
            dist.reduce(mine, op=op, group=group, group_dst=root)
            return [mine] if rank == root else []
        case "all_gather":
            dist.all_gather(empty, mine, group=group)
            return empty
        case "all_gather_single":
            out = lay(torch.cat(empty))
            all_gather_single(out, mine, group=group)
            return [out]
        case "gather":
            dist.gather(mine, empty if rank == root else None, group=group, group_dst=root)
            return empty if rank == root else []
        case "scatter":
            dist.scatter(mine, blocks if rank == root else None, group=group, group_src=root)
            return [mine]
        case "reduce_scatter":
            dist.reduce_scatter(mine, blocks, op, group=group)
            return [mine]
        case "reduce_scatter_uneven":
            blocks = [values(seed + 7, rank * size + i, (i + 1, *shape), dtype).to(device) for i in range(size)]
            out = torch.full((rank + 1, *shape), 9, dtype=dtype, device=device)
            dist.reduce_scatter(out, blocks, op, group=group)
            return [out]
        case "reduce_scatter_single":
            reduce_scatter_single(mine, lay(torch.cat(blocks)), op, group=group)
            return [mine]
        case "all_to_all":
            dist.all_to_all(empty, blocks, group=group)
            return empty
        case "all_to_all_single":
            out = lay(torch.cat(empty))
            dist.all_to_all_single(out, lay(torch.cat(blocks)), group=group)
            return [out]
        case "barrier":
            dist.barrier(group=group)
            return []
    raise ValueError(name)
