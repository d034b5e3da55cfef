"""How torch comes by our process groups: the backend ``eep``, registered under that name.

The default group brings up the world, later groups stand on it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eep.data_plane.rendezvous import Rendezvous
from eep.errors import EepError
from eep.process_group import torch_registry
from eep.process_group.agreement import Agreement
from eep.process_group.group import EepProcessGroup
from eep.process_group.group_options import Options
from eep.process_group.hosts.host_roster import HostRoster, next_life, reach_hosts
from eep.process_group.hosts.sealed_store import SealedStore
from eep.process_group.launch_store import LaunchStore
from eep.process_group.roster import LocalRoster, Roster
from eep.process_group.world import World

RENDEZVOUS = "EEP_RENDEZVOUS"
INCARNATION = "EEP_INCARNATION"
_PLACE = "eep/rendezvous"
"""Where the store says in which directory the ranks meet."""

_AFTER_CHILDREN = -1

_world: tuple[World, Agreement] | None = None


def create(backend: Any, options: Options | None) -> EepProcessGroup:
    """What torch calls for each group that this process belongs to."""
    global _world
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options must be an eep.pg.Options, got {type(options).__name__}")
    if others := torch_registry.other_backends():
        asked = " and ".join(f"{other} for {device}" for device, other in others.items())
        raise ValueError(
            f"a group of the eep backend takes the tensors of all its devices, and none of {asked}: ask for 'eep' with "
            "pg_options=eep.pg.Options(devices=...), and for a group of its own for each other backend "
            "(torch.distributed.new_group(backend=...))"
        )
    ranks = list(backend.global_ranks_in_group)
    timeout = backend.timeout.total_seconds()
    if not ranks:  # the default group
        if _world is not None:
            raise EepError("this process has a default group on the eep backend already; destroy it first")
        _world = _make_world(backend, options or Options(), timeout)
        # A process of multiprocessing ends without what is registered with atexit.
        multiprocessing.util.Finalize(None, close_world, exitpriority=_AFTER_CHILDREN)
        ranks = list(range(backend.group_size))
    elif _world is None:
        raise EepError(
            "the default group must be on the eep backend too: torch.distributed.init_process_group('eep', ...)"
        )
    closed = None
    if not backend.global_ranks_in_group:
        closed = partial(_leave, LaunchStore.behind(backend.store, backend.group_rank))
    return EepProcessGroup(
        *_world, backend.group_id, ranks, backend.timeout, closed, options.devices if options else None
    )


def close_world() -> None:
    """Leaves the instance, if this process is in one."""
    global _world
    parts, _world = _world, None
    if parts is not None:
        world, agreement = parts
        agreement.linger()
        world.close()
        agreement.close()


def _leave(store: LaunchStore | None) -> None:
    """The default group was destroyed: another may be made at once, which must not meet the store of this one."""
    close_world()
    if store is not None:
        store.wait_until_closed()


def _forget_world() -> None:
    """In a process that was forked: the world is that of its parent, which goes on."""
    global _world
    _world = None


def _make_world(backend: Any, options: Options, timeout: float) -> tuple[World, Agreement]:
    if "cuda" in options.devices and not torch.cuda.is_available():
        raise ValueError(
            f"eep.pg.Options(devices={options.devices}) needs a GPU, and torch finds none; leave out 'cuda'"
        )
    if options.incarnation is None and INCARNATION in os.environ:
        options = replace(options, incarnation=int(os.environ[INCARNATION]))
    rendezvous, temporary = _rendezvous(backend.store, options)
    world, roster = _open_world(backend, rendezvous, temporary, options)
    agreement = Agreement(world, roster)
    try:
        if options.defer_join:
            world.start_alone()
        else:
            agreement.found(timeout)
    except BaseException:
        world.close()
        agreement.close()
        raise
    world.on_growth(torch_registry.grow)
    return world, agreement


def _open_world(backend: Any, rendezvous: Rendezvous, temporary: bool, options: Options) -> tuple[World, Roster]:
    """The world, and where it finds its ranks."""
    rank, size = backend.group_rank, backend.group_size
    if (host := options.host) is None:
        world = World(rank, size, rendezvous, options, options.remote)
        return world, LocalRoster(world, rendezvous, temporary=temporary)
    with contextlib.ExitStack() as opened:
        store = SealedStore(backend.store, host.key)
        opened.callback(store.close)
        places, remote = reach_hosts(host, store)
        if options.incarnation is None:
            options = replace(options, incarnation=next_life(store, rendezvous, rank))
        world = World(rank, size, rendezvous, options, remote)
        opened.callback(world.close)
        roster = HostRoster(world, store, places, LocalRoster(world, rendezvous, temporary=temporary))
        opened.pop_all()
        return world, roster


def _rendezvous(store: Any, options: Options) -> tuple[Rendezvous, bool]:
    """Where to meet, and whether that place was made for this instance only."""
    path = options.rendezvous or os.environ.get(RENDEZVOUS)
    if path is not None:
        return Rendezvous(path), False
    place = _PLACE if options.host is None else f"{_PLACE}/{options.host.address}"
    if options.defer_join and options.host is None:
        if store.check([place]):
            return Rendezvous(store.get(place).decode()), True
        raise ValueError(
            f"a rank that joins later must know where, and the store does not: pass eep.pg.Options(rendezvous=...) or set "
            f"{RENDEZVOUS}, here and where the others were started"
        )
    # The first rank to come proposes a directory of its own. No rank trusts it: Rendezvous() checks whose it is.
    proposed = Rendezvous.temporary()
    chosen = store.compare_set(place, "", str(proposed.path)).decode()
    if chosen == str(proposed.path):
        return proposed, True
    proposed.close()
    return Rendezvous(chosen), True


# A process that ends without destroying its groups has left all the same, and says so.
atexit.register(close_world)
os.register_at_fork(after_in_child=_forget_world)
