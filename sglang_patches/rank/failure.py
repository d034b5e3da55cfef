"""How a rank tells its supervisor that an exception ends it, and no signal from outside.

What it worked on may be the cause: the front end watches its requests from then on. An exception of EEP's own says something
about the instance and nothing about a request, so it is not told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from eep.errors import EepError
from sglang_patches import hooks
from sglang_patches.rank import rank_session

T = TypeVar("T")
_evidence: str | None = None


def register() -> None:
    hooks.hook("managers.scheduler.Scheduler.run_event_loop", note_failure)


def note_failure(original: Callable[..., T], *arguments: object, **named: object) -> T:
    """SGLang logs an exception of its scheduler and goes on to its end."""
    global _evidence
    try:
        return original(*arguments, **named)
    except EepError:
        raise
    except Exception as error:
        _evidence = f"{type(error).__name__}: {error}"
        raise


def tell_failure() -> None:
    """Tell the supervisor, if there is something to tell. It kills this process: whatever is to be logged must be logged."""
    session = rank_session.get_session().joined if _evidence is not None else None
    if session is not None and _evidence is not None:
        session.member.fail(_evidence)
