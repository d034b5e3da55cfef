"""Parts of torch that ask a process group for its backend, each as what one member does. Answers are plain values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.process_group.collective_calls import all_gather_single, reduce_scatter_single, values
from tests.process_group.members import MemberProgram

COALESCED = ("all_reduce", "all_gather_single", "reduce_scatter_single")
CPU = torch.device("cpu")
FLOAT = torch.float32


def device_types(member: MemberProgram, group: str = "world") -> tuple[list[str], str, list[bool]]:
    """The devices of a group, the name of its backend, and what that says it supports."""
    pg = member.groups[group]
    backend = pg._get_backend(CPU)
    supported = [backend.supports_splitting, backend.supports_coalescing, backend.supports_tensor_alloc(CPU)]
    return [str(device) for device in pg._device_types], backend.name(), supported


def backend_of_another_device(member: MemberProgram) -> None:
    member.groups["world"]._get_backend(torch.device("cuda"))


def sum_by_the_backend(member: MemberProgram) -> list[float]:
    tensor = torch.full((2,), float(member.rank + 1))
    member.groups["world"]._get_backend(CPU).allreduce([tensor]).wait()
    return tensor.tolist()


def save_in_background(member: MemberProgram, path: str, own_group: bool) -> dict[str, list[float]]:
    """What is read back from a checkpoint. One with a group of its own is saved while the default group is in use."""
    size = member.groups["world"].size()
    written = {"shared": torch.arange(3.0), f"of {member.rank}": torch.full((2,), float(member.rank))}
    group = dist.new_group() if own_group else None
    saving = checkpoint.async_save(written, checkpoint_id=path, process_group=group)
    if own_group:
        dist.all_reduce(torch.ones(1))
    saving.result(60)  # type: ignore[union-attr]
    read = {"shared": torch.zeros(3)} | {f"of {rank}": torch.full((2,), -1.0) for rank in range(size)}
    checkpoint.load(read, checkpoint_id=path)
    return {name: tensor.tolist() for name, tensor in read.items()}


def load_from_rank_0(member: MemberProgram, sharded: bool) -> dict[str, list[float]]:
    """The parameters of a model whose state only rank 0 knows."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
    state = {name: torch.full_like(p, float(i)) for i, (name, p) in enumerate(model.named_parameters())}
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state if member.rank == 0 else {}, options=options)
    full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
    return {name: tensor.flatten().tolist() for name, tensor in full.items()}


def gradients_of_uneven_inputs(member: MemberProgram, by_initial_size: bool) -> list[float]:
    """Those of DDP's ``join``: rank r has r + 1 batches, of one value each, and then only looks on."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    gradients = []
    with model.join(divide_by_initial_world_size=by_initial_size):
        for batch in range(member.rank + 1):
            model.zero_grad()
            model(torch.full((1, 1), 6.0 * (batch + 1))).sum().backward()
            gradients.append(model.module.weight.grad.item())
    return gradients


def coalesce(member: MemberProgram, name: str, by_device: bool, in_background: bool) -> list[torch.Tensor]:
    """Three calls as one. Torch waits for what the group gives back at their end, or hands it to the caller."""
    pg = member.groups["world"]
    size = pg.size()
    manager = dist.distributed_c10d._coalescing_manager
    outs = [torch.full((4 * size if name == "all_gather_single" else 4,), 9.0) for _ in range(3)]
    ins = [values(i, member.rank, (4 * size if name == "reduce_scatter_single" else 4,), FLOAT) for i in range(3)]
    with manager(pg, CPU if by_device else None, async_ops=in_background) as works:
        for out, tensor in zip(outs, ins, strict=True):
            if name == "all_reduce":
                dist.all_reduce(out.copy_(tensor))
            elif name == "all_gather_single":
                all_gather_single(out, tensor)
            else:
                reduce_scatter_single(out, tensor)
    if in_background:
        works.wait()
    return outs


def coalesce_messages(member: MemberProgram, lengths: tuple[int, ...], in_background: bool) -> list[torch.Tensor]:
    """Round the ring, in one batch."""
    pg = member.groups["world"]
    after, before = (member.rank + 1) % pg.size(), (member.rank - 1) % pg.size()
    outs = [torch.zeros(length) for length in lengths]
    with dist.distributed_c10d._coalescing_manager(pg, CPU, async_ops=in_background) as works:
        for seed, out in enumerate(outs):
            dist.isend(values(seed, member.rank, tuple(out.shape), FLOAT), after)
            dist.irecv(out, before)
    if in_background:
        works.wait()
    return outs


def receive_coalesced(member: MemberProgram, source: int, lengths: tuple[int, ...]) -> list[Any]:
    """What became of each of several receives in one batch, after the first that failed has been told."""
    outs = [torch.zeros(length) for length in lengths]
    try:
        with dist.distributed_c10d._coalescing_manager(member.groups["world"], CPU):
            for out in outs:
                dist.irecv(out, source)
    except ValueError as error:
        return [str(error), *outs]
    return [None, *outs]


def batch_messages(member: MemberProgram, length: int) -> torch.Tensor:
    pg = member.groups["world"]
    out = torch.zeros(length)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, values(1, member.rank, (length,), FLOAT), (member.rank + 1) % pg.size()),
            dist.P2POp(dist.irecv, out, (member.rank - 1) % pg.size()),
        ]
    )
    for work in works:
        work.wait()
    return out


def batch_to_itself(member: MemberProgram) -> list[str]:
    """How each message of a batch ended."""
    ends = []
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(1), member.rank), dist.P2POp(dist.irecv, torch.zeros(1), member.rank)]
    ):
        try:
            work.wait()
            ends.append("")
        except ValueError as error:
            ends.append(str(error))
    return ends
