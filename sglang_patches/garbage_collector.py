"""Python's garbage collector must not stop a process that every token waits for.

Now and then it looks through all that a process has. In one that has imported SGLang that takes half a second, in which
clients get nothing and, in the controller, a loss is not noticed. What a process has when it is up stays until it ends, so
from then on it is left out. SGLang 0.5.21 does so after its warm-up, if there is one, and 0.5.17 does not; here it is done in
every version, and in what only this plugin has: the controller with the supervisor, and ranks that come later.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any


def freeze_this_process(*, collect: bool = False) -> None:
    """In a process that is up. ``collect``: but not what is garbage already, since it may hold memory of a device."""
    if collect:
        gc.collect()
    gc.freeze()


def freeze_server(manager: Any) -> None:
    """In the front end, as soon as it serves, and from there in the ranks and the detokenizer."""
    asyncio.run_coroutine_threadsafe(manager.freeze_gc(), manager.event_loop)
