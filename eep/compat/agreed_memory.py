"""What the ranks of a group tell each other before they have memory in common: where they meet, and for which sizes."""

from __future__ import annotations

import contextlib
import pathlib

import torch.distributed as dist

from eep.compat.sizes import Sizes
from eep.data_plane.rendezvous import Rendezvous
from eep.errors import EepError


def agree(
    group: dist.ProcessGroup | None, given: pathlib.Path | None, sizes: Sizes | None, opened: contextlib.ExitStack
) -> tuple[pathlib.Path, Sizes | None]:
    """Rank 0 says where to meet, and every rank for which sizes: those of any rank that knows them. A directory that rank 0
    has made goes with what it has ``opened``."""
    path, error = given, None
    if dist.get_rank(group) == 0 and path is None:
        try:
            path = opened.enter_context(Rendezvous.temporary()).path
        except BaseException as caught:  # whatever went wrong, the other ranks must not wait forever
            error = caught
    told: list[tuple[pathlib.Path | None, Sizes | None]] = [(None, None)] * dist.get_world_size(group)
    dist.all_gather_object(told, (path, sizes), group=group)
    if error is not None:
        raise error
    if (place := told[0][0]) is None:
        raise EepError("rank 0 could not make a rendezvous directory; read its error for the cause")
    known = {each for _, each in told if each is not None}
    if len(known) > 1:
        raise ValueError(f"the ranks asked for memory of different sizes: {', '.join(sorted(map(str, known)))}")
    return given or place, next(iter(known), None)
