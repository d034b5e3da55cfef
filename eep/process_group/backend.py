"""How torch comes by our process groups: the backend ``eep``, registered under that name.

The default group brings up the world, later groups stand on it. All ranks must be on one host.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from eep.data_plane.rendezvous import Rendezvous
from eep.errors import EepError
from eep.process_group.agreement import Agreement
from eep.process_group.group import EepProcessGroup
from eep.process_group.group_options import Options
from eep.process_group.world import World

RENDEZVOUS = "EEP_RENDEZVOUS"
INCARNATION = "EEP_INCARNATION"
_PLACE = "eep/rendezvous"
"""Where the store says in which directory the ranks meet."""

_world: tuple[World, Agreement] | None = None


def create(backend: Any, options: Options | None) -> EepProcessGroup:
    """What torch calls for each group that this process belongs to."""
    global _world
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options must be an eep.pg.Options, got {type(options).__name__}")
    ranks = list(backend.global_ranks_in_group)
    timeout = backend.timeout.total_seconds()
    if not ranks:  # the default group
        if _world is not None:
            raise EepError("this process has a default group on the eep backend already; destroy it first")
        _world = _make_world(backend, options or Options(), timeout)
        ranks = list(range(backend.group_size))
    elif _world is None:
        raise EepError(
            "the default group must be on the eep backend too: torch.distributed.init_process_group('eep', ...)"
        )
    closed = None if backend.global_ranks_in_group else close_world
    return EepProcessGroup(
        *_world, backend.group_id, ranks, backend.timeout, closed, options.devices if options else None
    )


def close_world() -> None:
    """Leaves the instance, if this process is in one."""
    global _world
    parts, _world = _world, None
    for part in parts or ():
        part.close()


def _make_world(backend: Any, options: Options, timeout: float) -> tuple[World, Agreement]:
    if options.incarnation is None and INCARNATION in os.environ:
        options = replace(options, incarnation=int(os.environ[INCARNATION]))
    rendezvous, temporary = _rendezvous(backend.store, options)
    world = World(backend.group_rank, backend.group_size, rendezvous, options)
    agreement = Agreement(world, rendezvous, temporary=temporary)
    try:
        if options.defer_join:
            world.start_alone()
        else:
            agreement.found(timeout)
    except BaseException:
        world.close()
        agreement.close()
        raise
    world.on_growth(_tell_torch)
    return world, agreement


def _rendezvous(store: Any, options: Options) -> tuple[Rendezvous, bool]:
    """Where to meet, and whether that place was made for this instance only."""
    path = options.rendezvous or os.environ.get(RENDEZVOUS)
    if path is not None:
        return Rendezvous(path), False
    if options.defer_join:
        if store.check([_PLACE]):
            return Rendezvous(store.get(_PLACE).decode()), True
        raise ValueError(
            f"a rank that joins later must know where, and the store does not: pass eep.pg.Options(rendezvous=...) or set "
            f"{RENDEZVOUS}, here and where the others were started"
        )
    # The first rank to come proposes a directory of its own. No rank trusts it: Rendezvous() checks whose it is.
    proposed = Rendezvous.temporary()
    chosen = store.compare_set(_PLACE, "", str(proposed.path)).decode()
    if chosen == str(proposed.path):
        return proposed, True
    proposed.close()
    return Rendezvous(chosen), True


def _tell_torch(size: int) -> None:
    """Ranks were added: torch keeps a table of its own of who is in which group."""
    groups: dict[Any, dict[int, int]] = dist.distributed_c10d._world.pg_group_ranks
    for group, ranks in groups.items():
        if isinstance(group, EepProcessGroup) and group.ranks == list(range(size)):
            ranks.update({rank: rank for rank in range(size)})


# A process that ends without destroying its groups has left all the same, and says so.
atexit.register(close_world)
