"""The ``torch.distributed`` backend ``eep``: process groups that outlive their ranks.

``group_options`` what a caller may choose · ``backend`` how torch makes groups · ``torch_registry`` what it knows of
them · ``group`` torch's interface · ``calls`` tensors to native arguments (``call``), ``uneven`` where blocks differ in
size · ``lane`` a group's calls into the library · ``point_to_point`` send and receive (``monitored_barrier``) ·
``world`` the membership that all groups of a process share · ``agreement`` on views, without a supervisor
(``view_log``, ``peer_watch``, ``peer_state``) · ``own_backend`` what torch asks of a backend · ``gate`` between calls
and views · ``runner`` what runs where, ``call_queue`` in which order · ``work`` what a call gives back, ``work_batch``
and several of them.

:mod:`eep.pg` is what users call beside ``torch.distributed`` itself.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any


def register() -> None:
    """Makes ``torch.distributed.init_process_group("eep")`` known. Doing it again does nothing."""
    from torch.distributed import Backend

    if "EEP" not in Backend._plugins:
        Backend.register_backend("eep", _create, extended_api=True, devices=["cpu", "cuda"])
        _extend_monitored_barrier()


def _create(backend: Any, options: Any) -> Any:
    # Loaded with the first group: a process that only imports torch need not pay for it.
    from eep.process_group.backend import create

    return create(backend, options)


def _extend_monitored_barrier() -> None:
    """Torch's own refuses all groups but those of gloo, by the name of the backend. For other groups it stays what it is."""
    from torch import distributed as dist

    of_torch = dist.monitored_barrier

    @functools.wraps(of_torch)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        from eep.process_group.group import EepProcessGroup

        chosen = dist.group.WORLD if group is None else group
        if isinstance(chosen, EepProcessGroup):
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            of_torch(group, timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier
