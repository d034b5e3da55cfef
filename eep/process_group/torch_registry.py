"""What torch keeps of each group, beside the group: its tables say which global rank is which rank of it.

Torch fills them for groups that it makes itself. Those that :func:`eep.pg.split` makes are entered here.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from eep.process_group.group import EepProcessGroup

# Its names are private and change their types from version to version.
c10d: Any = dist.distributed_c10d


def other_backends() -> dict[str, str]:
    """By kind of device, the backends beside ours that torch was asked for in the group that it is making. Torch tells a
    backend nothing of the others, and drops them where ours makes the group."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_new_process_group_helper":
        if frame.f_back is None:
            return {}
        frame = frame.f_back
    asked = frame.f_locals.get("backend_config")
    devices = asked.get_device_backend_map() if isinstance(asked, c10d.BackendConfig) else {}
    return {device: backend for device, backend in devices.items() if backend.lower() != "eep"}


def enter(group: EepProcessGroup, parent: EepProcessGroup) -> None:
    """Torch's functions take ``group`` from now on, and the end of the default group ends it."""
    tables, name = c10d._world, group.getGroupName()
    for past in [each for each, used in tables.pg_names.items() if used == name]:
        _forget(past)  # its name was free, so it has ended without torch
    backend = dist.Backend("eep")
    tables.pg_map[group] = (backend, tables.pg_map[parent][1])
    tables.pg_names[group] = name
    tables.pg_backend_config[group] = str(c10d.BackendConfig(backend))
    tables.pg_group_ranks[group] = {rank: place for place, rank in enumerate(group.ranks)}
    tables.pg_to_tag[group] = f"ptd:{name}"
    tables.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    c10d._register_process_group(name, group)


def grow(size: int) -> None:
    """Ranks were added, to every group that has all of them."""
    for group, ranks in c10d._world.pg_group_ranks.items():
        if isinstance(group, EepProcessGroup) and group.ranks == list(range(size)):
            ranks.update({rank: rank for rank in range(size)})


def _forget(group: Any) -> None:
    tables = c10d._world
    c10d._unregister_process_group(tables.pg_names.pop(group))
    for table in (tables.pg_map, tables.pg_backend_config, tables.pg_group_ranks):
        table.pop(group, None)
    tables.tags_to_pg[tables.pg_to_tag.pop(group)].remove(group)
