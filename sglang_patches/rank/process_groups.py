"""SGLang's process groups, on the ``eep`` backend of torch.distributed.

A rank starts alone: every group has the size that SGLang expects, and contains only this rank until it joins. So no rank
waits for another while it loads the model, at its first launch or at a later one. Communicators that SGLang would put beside
a group (NCCL, custom all-reduce, a message queue in shared memory) are left out: they do not survive the loss of a rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import eep.pg
from eep.control.private_directory import member_rendezvous
from eep.process_group.world import World
from sglang_patches import cpu, hooks, options
from sglang_patches.rank import host_access, next_life
from sglang_patches.rank.patience import between_steps_ms

_BARRIER = "model_executor.model_runner_components.load_model_utils.dist_barrier_after_load"
_LEFT_OUT = (
    "use_pynccl",
    "use_mscclpp",
    "use_pymscclpp",  # its name in 0.5.17
    "use_custom_allreduce",
    "use_torch_symm_mem_all_reduce",
    "use_message_queue_broadcaster",
)


def register() -> None:
    hooks.hook("distributed.bootstrap._resolve_backend", _backend, "replace")
    hooks.hook("distributed.parallel_state.init_distributed_environment", _start_alone, "before")
    hooks.hook("distributed.parallel_state.GroupCoordinator.__init__", _make_coordinator)
    hooks.hook(_BARRIER, _skip_barrier, "replace")
    hooks.hook("utils.common.broadcast_pyobj", _broadcast)


def world() -> World:
    """The membership that all groups of this process share."""
    found: World = dist.group.WORLD.world  # type: ignore[union-attr]
    return found


def _backend(*_: Any, **__: Any) -> str:
    return "eep"


def _skip_barrier(*_: Any, **__: Any) -> None:
    """A rank that has loaded its weights is still alone, and has no peer to wait for."""


def _broadcast(original: Callable[..., Any], data: Any, *arguments: Any, **named: Any) -> Any:
    """What SGLang broadcasts at the start is the same on every rank: all start from the same arguments."""
    if len(world().view.active) == 1:
        return data
    return original(data, *arguments, **named)


def _start_alone(*arguments: Any, **named: Any) -> None:
    """Make the default group before SGLang does, with a private store: SGLang's would wait for the other ranks."""
    if dist.is_initialized():
        return
    if arguments:
        named.update(zip(("world_size", "rank"), arguments, strict=False))
    dist.init_process_group(
        "eep",
        store=torch._C._distributed_c10d.HashStore(),
        rank=named["rank"],
        world_size=named["world_size"],
        timeout=_patience(),
        pg_options=eep.pg.Options(
            defer_join=True,
            claims=not next_life.is_awaited(),
            max_ranks=options.required().max_ranks,
            rendezvous=member_rendezvous() / "groups",
            devices=("cpu",) if cpu.is_asked_for() else ("cpu", "cuda"),
            remote=host_access.remote_hosts(options.required(), "groups"),
        ),
    )
    if next_life.is_awaited():
        next_life.when_begun(world().claim)


def _patience() -> timedelta:
    """How long a rank waits for a peer between two steps before it suspects the peer. SGLang would wait for hours."""
    return timedelta(milliseconds=between_steps_ms(options.required().timeout_ms))


def _make_coordinator(original: Callable[..., None], coordinator: Any, *arguments: Any, **named: Any) -> None:
    named.update((name, False) for name in _LEFT_OUT if name in named)
    with _all_groups_on_eep():
        original(coordinator, *arguments, **named)


@contextlib.contextmanager
def _all_groups_on_eep() -> Iterator[None]:
    """SGLang asks for gloo by name where it wants a group of the host."""
    real = dist.new_group

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **named: Any
    ) -> Any:
        of_the_host = eep.pg.Options() if backend == "gloo" else None
        return real(ranks, _patience(), "eep", of_the_host, **named)

    dist.new_group = new_group  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.new_group = real
