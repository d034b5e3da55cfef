"""Python's garbage collector must not stop a process that every token waits for.

Now and then the collector visits every object of a process. After an import of SGLang that takes half a second. Meanwhile
clients get nothing, and the controller notices no loss. What a process holds when it is up stays until it ends, so from then
on the collector leaves it out (``gc.freeze``). SGLang 0.5.21 does so after its warm-up, if there is one; 0.5.17 does not.
The plugin does it in every version, in the controller, and in ranks that come later.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any


def freeze_this_process(*, collect: bool = False) -> None:
    """For a process that is up. ``collect``: first collect what is garbage already, which may hold memory of a device."""
    if collect:
        gc.collect()
    gc.freeze()


def freeze_server(manager: Any) -> None:
    """For the front end as soon as it serves; it passes the order on to the ranks and the detokenizer."""
    asyncio.run_coroutine_threadsafe(manager.freeze_gc(), manager.event_loop)
