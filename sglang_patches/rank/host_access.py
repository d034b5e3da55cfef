"""How this rank reaches the ranks of other hosts: through links that it finds in the store of the instance."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from eep.control.private_directory import CONTROL_DIRECTORY, PrivateDirectory
from eep.data_plane.transport.remote_hosts import RemoteHosts
from eep.data_plane.transport.scoped_registry import ScopedRegistry
from eep.experts.backup.starting_engine import StartingEngine
from eep.experts.instance_hosts import InstanceHosts
from eep.experts.registry.store_registry import StoreRegistry
from sglang_patches import options, store_access
from sglang_patches.options import ServerOptions


def remote_hosts(wanted: ServerOptions, scope: str) -> RemoteHosts | None:
    """What the buffers, or the process groups, of that name need. None if all ranks are on this host."""
    if wanted.host is None:
        return None
    registry = ScopedRegistry(store_registry(), scope)
    return RemoteHosts(wanted.remote_ranks, wanted.host.address, registry, _key(), wanted.host.provider)


def instance_hosts(wanted: ServerOptions) -> InstanceHosts | None:
    """What the experts of this rank need. None if all ranks are on this host."""
    if wanted.host is None:
        return None
    # Names that sort as the numbers do: placements number hosts by their names.
    names = tuple(f"node-{wanted.host_of(rank):04}" for rank in range(wanted.max_ranks))
    return InstanceHosts(names, names[wanted.host.ranks[0]], store_registry(), StartingEngine(wanted.host.address))


@cache
def store_registry() -> StoreRegistry:
    """Where ranks of all hosts tell each other how to be reached, and what they hold."""
    return store_access.open_registry(options.required(), _directory())


def _directory() -> Path:
    return Path(os.environ[CONTROL_DIRECTORY])


def _key() -> bytes:
    """That of the instance: the server has put it into its private directory."""
    return PrivateDirectory(_directory()).key()
