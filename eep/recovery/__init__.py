"""The step of an instance whose ranks may die at any moment: the session that runs it, what ranks tell each other when they
enter an epoch, and the contract of a valid instance.

``Session`` is loaded when it is first used: whoever only checks the contract needs neither the control plane nor torch.
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
