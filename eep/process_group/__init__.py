"""The ``torch.distributed`` backend ``eep``: process groups that outlive their ranks.

``group_options`` what a caller may choose · ``backend`` how torch makes groups · ``group`` torch's interface · ``calls``
tensors to native arguments (``call``), ``uneven`` where blocks differ in size · ``lane`` a group's calls into the library ·
``point_to_point`` send and receive (``monitored_barrier``) · ``world`` the membership that all groups of a process share ·
``agreement`` on views, without a supervisor (``view_log``, ``peer_watch``, ``peer_state``) · ``own_backend`` what torch asks
of a backend · ``gate`` between calls and views · ``runner`` what runs when · ``work`` what a call gives back, ``work_batch``
and several of them.

:mod:`eep.pg` is what users call beside ``torch.distributed`` itself.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Makes ``torch.distributed.init_process_group("eep")`` known. Doing it again does nothing."""
    from torch.distributed import Backend

    if "EEP" not in Backend._plugins:
        Backend.register_backend("eep", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(backend: Any, options: Any) -> Any:
    # Loaded with the first group: a process that only imports torch need not pay for it.
    from eep.process_group.backend import create

    return create(backend, options)
