"""The process group that torch sees: each of its methods makes calls of tensors, and has them run in order.

Torch has had two names for some methods; both are here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from eep.errors import EepError
from eep.process_group import calls, uneven
from eep.process_group.agreement import Agreement
from eep.process_group.call import Call
from eep.process_group.call_arguments import (
    choose_option,
    choose_timeout,
    list_blocks,
    list_blocks_of_root,
    list_tensors,
    take_one_tensor,
)
from eep.process_group.monitored_barrier import MonitoredBarrier
from eep.process_group.own_backend import OwnBackend
from eep.process_group.point_to_point import Messages
from eep.process_group.runner import Runner
from eep.process_group.work import EepWork
from eep.process_group.world import World

if TYPE_CHECKING:
    # Torch types its methods with overloads that change from version to version.
    class TorchGroup:
        def __init__(self, rank: int, size: int) -> None: ...
else:
    TorchGroup = torch.distributed.ProcessGroup


class EepProcessGroup(OwnBackend, TorchGroup):
    """A group over the active ranks of the world. See :mod:`eep.pg` for what it can do beside torch's interface."""

    def __init__(
        self,
        world: World,
        agreement: Agreement,
        name: str,
        ranks: list[int],
        timeout: timedelta,
        closed: Callable[[], None] | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        """``closed`` is what follows the end of this group, if it is more than the end of its lane. ``devices``: whose
        tensors it takes, by default those of the world."""
        super().__init__(ranks.index(world.rank), len(ranks))
        self.world, self.agreement = world, agreement
        self._closed = closed or (lambda: world.close_lanes(name))
        self.timeout = timeout.total_seconds()
        self._name = name
        self._lanes = {device: world.open_lane(name, list(ranks), device) for device in devices or world.devices}
        self._lane = self._lanes["cpu"]
        self._messages = Messages(world.endpoint, self._lane, self.timeout)
        self._monitored_barrier = MonitoredBarrier(self._messages, self._lane)
        self._runner = Runner(name, self._lanes)
        self._destroyed = False
        self._process = os.getpid()

    # ---- what it is ----

    @property
    def ranks(self) -> list[int]:
        """The ranks of the world that belong to this group, active or not."""
        return self._lane.ranks

    def rank(self) -> int:
        return self.ranks.index(self.world.rank)

    def size(self) -> int:
        return len(self.ranks)

    def name(self) -> str:
        return "eep"

    def getRank(self) -> int:
        return self.rank()

    def getSize(self) -> int:
        return self.size()

    def getBackendName(self) -> str:
        return "eep"

    def getGroupName(self) -> str:
        """By which torch finds the group again: when it is destroyed, and from functional collectives."""
        return self._name

    def active(self) -> tuple[int, ...]:
        """The ranks of this group that are in the view, as ranks of the group."""
        return self._lane.positions(self._lane.active())

    def world_rank(self, rank: int) -> int:
        """The rank of the world behind a rank of this group; in a group of all ranks also of those that may come."""
        if self.ranks != list(range(self.world.size)):
            return self._global(rank)
        if not 0 <= rank < self.world.endpoint.max_ranks:
            raise ValueError(
                f"rank {rank} cannot be in this group: there are {self.size()} ranks, and never more than "
                f"{self.world.endpoint.max_ranks} (eep.pg.Options(max_ranks=...))"
            )
        return rank

    # ---- collectives ----

    def allreduce(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None, **given: Any) -> EepWork:
        op = choose_option(opts, given, "reduceOp", "op", torch.distributed.ReduceOp.SUM)
        return self._run([calls.all_reduce(tensor, op) for tensor in list_tensors(tensors)], opts)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> EepWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None, **given: Any) -> EepWork:
        root = self._global(choose_option(opts, given, "rootRank", "root", 0))
        return self._run([calls.broadcast(tensor, root) for tensor in list_tensors(tensors)], opts)

    def reduce(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None, **given: Any) -> EepWork:
        root = self._global(choose_option(opts, given, "rootRank", "root", 0))
        op = choose_option(opts, given, "reduceOp", "op", torch.distributed.ReduceOp.SUM)
        return self._run([calls.reduce(tensor, op, root) for tensor in list_tensors(tensors)], opts)

    def allgather(
        self, outputs: Sequence[Any], inputs: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None
    ) -> EepWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._run(
            [
                calls.all_gather(list_blocks("all_gather", blocks, self.size()), tensor)
                for blocks, tensor in zip(outputs, inputs, strict=True)
            ],
            opts,
        )

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> EepWork:
        # Outputs come by rank, then by tensor.
        return self.allgather([list(blocks) for blocks in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> EepWork:
        return self._run([calls.all_gather_single(output, tensor, self.size())], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> EepWork:
        return self._run(
            [
                calls.all_gather_single(output, tensor, self.size())
                for output, tensor in zip(outputs, inputs, strict=True)
            ],
            opts,
        )

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> EepWork:
        root = opts.rootRank if opts is not None else 0
        blocks = list_blocks_of_root("gather", outputs, self.size(), is_root=root == self.rank())
        return self._run([calls.gather(blocks, inputs[0], self._global(root))], opts)

    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> EepWork:
        root = opts.rootRank if opts is not None else 0
        blocks = list_blocks_of_root("scatter", inputs, self.size(), is_root=root == self.rank())
        return self._run([calls.scatter(outputs[0], blocks, self._global(root))], opts)

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> EepWork:
        op = opts.reduceOp if opts is not None else torch.distributed.ReduceOp.SUM
        epoch = self._lane.epoch  # read before the active ranks, on which the calls for uneven blocks depend
        batch: list[Call] = []
        for output, given in zip(outputs, inputs, strict=True):
            blocks = list_blocks("reduce_scatter", given, self.size())
            if uneven.is_uneven(blocks):
                batch += uneven.reduce_scatter(output, blocks, op, self.ranks, self.active(), self.rank())
            else:
                batch.append(calls.reduce_scatter(output, blocks, op))
        return self._run(batch, opts, epoch)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> EepWork:
        op = opts.reduceOp if opts is not None else torch.distributed.ReduceOp.SUM
        return self._run([calls.reduce_scatter_single(output, tensor, op, self.size())], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> EepWork:
        op = opts.reduceOp if opts is not None else torch.distributed.ReduceOp.SUM
        return self._run(
            [
                calls.reduce_scatter_single(output, tensor, op, self.size())
                for output, tensor in zip(outputs, inputs, strict=True)
            ],
            opts,
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> EepWork:
        got, given = (list_blocks("all_to_all", blocks, self.size()) for blocks in (outputs, inputs))
        return self._run([calls.all_to_all(got, given)], opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> EepWork:
        return self._run(
            [calls.all_to_all_single(output, tensor, output_splits, input_splits, self.size())],
            opts,
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, **given: Any) -> EepWork:
        return self._run([calls.barrier()], opts)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        seconds = self.timeout if timeout is None else timeout
        seconds = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        self._monitored_barrier.run(self.world.rank, seconds, wait_all_ranks)

    # ---- messages ----

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> EepWork:
        return self._note(self._messages.send(take_one_tensor("send", tensors), self._global(to), tag))

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int = 0) -> EepWork:
        return self._note(self._messages.receive(take_one_tensor("recv", tensors), self._global(source), tag))

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> EepWork:
        return self._note(self._messages.receive(take_one_tensor("recv", tensors), None, tag))

    # ---- subgroups and the end ----

    def split_group(self, ranks: Sequence[int], *, group_name: str | None = None, **_: Any) -> EepProcessGroup | None:
        """A group of ``ranks`` (of this group), for those who are among them. Every member of the new one calls it; one that
        comes later does so before it joins."""
        if self.rank() not in ranks:
            return None
        members = [self.world_rank(rank) for rank in sorted(set(ranks))]
        name = group_name or f"{self._name}/split/{','.join(map(str, members))}"
        return EepProcessGroup(self.world, self.agreement, name, members, timedelta(seconds=self.timeout))

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = self._messages.timeout = timeout.total_seconds()

    def abort(self) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Ends the group. What still runs in its threads ends on its own, or with the world."""
        if self._destroyed:
            return
        self._destroyed = True
        if self._process != os.getpid():
            return  # a fork of the process that is in the group, and stays in it
        self._runner.close()
        self._messages.close()
        self._closed()

    # ---- running calls ----

    def _run(self, batch: list[Call], opts: Any, epoch: int | None = None) -> EepWork:
        """``epoch`` is given for calls that are right in the view of that epoch only."""
        if self._destroyed:
            raise EepError(f"{batch[0].name if batch else 'call'}: this process group was destroyed")
        timeout = choose_timeout(opts, self.timeout)
        in_background = getattr(opts, "asyncOp", False)
        return self._note(self._runner.run(batch, timeout, in_background=in_background, epoch=epoch))

    def _global(self, rank: int) -> int:
        if not 0 <= rank < self.size():
            raise ValueError(f"rank {rank} is not in this group of {self.size()}")
        return self.ranks[rank]
