"""EEP: elastic expert parallelism.

MoE ranks exchange tokens with :func:`dispatch` and :func:`combine` through a :class:`Buffer`. Any rank may die at any moment:
the survivors never hang, never use half of a message from the dead rank, and know which step not to trust.

Each name is loaded when it is first used, so that a supervisor need not import torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eep import pg
    from eep.data_plane.buffer import Buffer
    from eep.data_plane.operators import combine, dispatch
    from eep.data_plane.rendezvous import Rendezvous
    from eep.data_plane.status import Status
    from eep.errors import EepError, EpochRevoked, PeerUnreachable, RankInUse, RankRemoved, StepFailed
    from eep.view import View

_HOME = {
    "Buffer": "eep.data_plane.buffer",
    "EepError": "eep.errors",
    "EpochRevoked": "eep.errors",
    "PeerUnreachable": "eep.errors",
    "RankInUse": "eep.errors",
    "RankRemoved": "eep.errors",
    "Rendezvous": "eep.data_plane.rendezvous",
    "Status": "eep.data_plane.status",
    "StepFailed": "eep.errors",
    "View": "eep.view",
    "combine": "eep.data_plane.operators",
    "dispatch": "eep.data_plane.operators",
}

__all__ = [
    "Buffer",
    "EepError",
    "EpochRevoked",
    "PeerUnreachable",
    "RankInUse",
    "RankRemoved",
    "Rendezvous",
    "Status",
    "StepFailed",
    "View",
    "combine",
    "dispatch",
    "pg",
]


def __getattr__(name: str) -> Any:
    if name == "pg":
        return importlib.import_module("eep.pg")
    if name not in _HOME:
        raise AttributeError(f"module 'eep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


# If torch was imported first, register the backend "eep" here; otherwise torch finds it through its entry point.
if "torch" in sys.modules:
    from eep.process_group import register

    register()
