"""The step of an instance whose ranks may die at any moment.

``session`` runs the step, ``callbacks`` says what it asks of its caller, ``intents`` is what ranks tell each other when they
enter an epoch, and ``contract`` checks that an instance is valid.

``Session`` is loaded when it is first used: code that only checks the contract needs neither the control plane nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eep.recovery.session import Session

__all__ = ["Session"]


def __getattr__(name: str) -> Any:
    if name != "Session":
        raise AttributeError(f"module 'eep.recovery' has no attribute {name!r}")
    from eep.recovery.session import Session

    return Session
