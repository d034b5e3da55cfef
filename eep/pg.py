"""What a process group on the ``eep`` backend can do beside ``torch.distributed``: lose ranks, and get them back.

On the survivors, when a collective has raised :class:`eep.EpochRevoked`::

    dead = eep.pg.dead_ranks(pg)            # (2,)
    eep.pg.deactivate_ranks(pg, dead)       # the same group goes on over the others; ranks keep their numbers
    ...
    if eep.pg.get_peer_state(pg, [2]) == ["waiting"]:
        eep.pg.recover_ranks(pg, [2])       # between two steps, on every survivor

On the process that takes the place of rank 2::

    dist.init_process_group("eep", rank=2, world_size=4, pg_options=eep.pg.Options(defer_join=True, rendezvous=...), ...)
    ...                                     # load, warm up: collectives are local, no rank waits for this process
    eep.pg.join(dist.group.WORLD)

Membership is that of the process: it is in, or out of, all its groups at once, whichever group is named. Ranks are those of
the group that is named. With a supervisor (:mod:`eep.control`) none of this is called: it commits views, and
:func:`apply_view` enters them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from eep.process_group import register, torch_registry
from eep.process_group.group import EepProcessGroup
from eep.process_group.group_options import Options
from eep.process_group.hosts.host import Host
from eep.process_group.peer_state import PeerState
from eep.process_group.work import EepWork
from eep.process_group.work_batch import WorkBatch
from eep.view import View

__all__ = [
    "Host",
    "Options",
    "PeerState",
    "answered",
    "apply_view",
    "check",
    "deactivate_ranks",
    "dead_ranks",
    "get_active_ranks",
    "get_peer_state",
    "join",
    "monitored_barrier",
    "recover_ranks",
    "split",
]

register()

PATIENCE = 30.0
"""Seconds that a change of membership may take before it is given up."""


def get_active_ranks(pg: Any) -> tuple[int, ...]:
    """The ranks of ``pg`` that are in the view; all its reductions run over them."""
    return _eep(pg).active()


def dead_ranks(pg: Any) -> tuple[int, ...]:
    """The ranks of ``pg`` that are in the view although their process has ended, or although they left: those to go on
    without. :func:`get_peer_state` says which of the two it was."""
    group = _eep(pg)
    gone = group.world.endpoint.gone_peers()
    return tuple(rank for rank in group.active() if group.world_rank(rank) in gone)


def deactivate_ranks(pg: Any, ranks: Iterable[int], *, timeout: float = PATIENCE) -> View:
    """Goes on without ``ranks``. Every survivor calls it; pending calls end with :class:`eep.EpochRevoked`."""
    group = _eep(pg)
    return group.agreement.deactivate([group.world_rank(rank) for rank in ranks], timeout)


def get_peer_state(pg: Any, ranks: Iterable[int]) -> list[PeerState]:
    """Of each rank: ``active``, ``dead`` (in the view, and its process has ended), ``left`` (in the view, and it said that it
    leaves), ``waiting`` (asks to be let in), ``starting`` (there, not ready) or ``absent``. Of these, ``active`` and
    ``waiting`` are true in an ``if``."""
    group = _eep(pg)
    return [group.agreement.state_of(group.world_rank(rank)) for rank in ranks]


def recover_ranks(pg: Any, ranks: Iterable[int], *, timeout: float = PATIENCE) -> View:
    """Lets in ranks that wait in :func:`join`, old ones or new ones. Every member calls it between the same two steps.

    Raises :class:`eep.PeerUnreachable`, and changes nothing anywhere, if a member cannot reach one of them within half of
    ``timeout``; the other half is for the members to wait for each other.
    """
    group = _eep(pg)
    return group.agreement.recover([group.world_rank(rank) for rank in ranks], timeout)


def join(pg: Any, *, timeout: float = PATIENCE) -> View:
    """For a process started with ``Options(defer_join=True)``: waits until the others let it in, into all its groups."""
    return _eep(pg).agreement.join(timeout)


def apply_view(pg: Any, view: View, *, timeout: float = PATIENCE) -> View:
    """Enters a view that a supervisor has committed."""
    return _eep(pg).world.apply(view, timeout)


def check(pg: Any) -> None:
    """Raises :class:`eep.StepFailed` if something went wrong in this view: on a GPU, where calls are only launched, this is
    how a step that is over is found to be good. Needs no synchronisation beyond the one after which results are read."""
    for endpoint in _eep(pg).world.endpoints:
        endpoint.status().raise_if_bad()


def monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the ranks that do not come within ``timeout``. Raises :class:`eep.StepFailed`, whose ``ranks``
    are those. ``torch.distributed.monitored_barrier`` does the same for groups of the eep backend."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    _eep(dist.group.WORLD if group is None else group).monitored_barrier(timeout, wait_all_ranks)


def split(pg: Any, ranks: Iterable[int], *, name: str | None = None) -> EepProcessGroup | None:
    """A group of some ranks of ``pg``, made by those ranks alone; None for a rank that is not among them. To torch it is a
    group like those of ``torch.distributed.new_group``.

    Where ``pg`` has all ranks, those that may come later (up to ``Options.max_ranks``) can be named too. The group runs
    without them, as it does without ranks that have died. One that comes makes the group, under the same ``name``, before
    :func:`join`, and is in it then. ``pg`` itself and every other group of all ranks there are has new ranks unnamed.
    """
    parent = _eep(pg)
    group = parent.split_group(list(ranks), group_name=name)
    if group is not None:
        torch_registry.enter(group, parent)
    return group


def answered(work: Any) -> tuple[int, ...]:
    """The ranks whose part a finished call has taken; in gathers, the slots of the others keep the caller's values."""
    if not isinstance(work, EepWork | WorkBatch):
        raise TypeError(f"this is not the work of an eep process group but a {type(work).__name__}")
    return work.answered


def _eep(pg: Any) -> EepProcessGroup:
    if not isinstance(pg, EepProcessGroup):
        raise TypeError(
            f"this is not a process group of the eep backend but a {type(pg).__name__}; make it with "
            "torch.distributed.init_process_group('eep', ...)"
        )
    return pg
