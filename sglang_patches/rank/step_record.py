"""What each step of a rank had in its batch, written down for a drill that looks for the step behind a wrong token.

Off unless ``EEP_STEP_RECORD`` names a directory. Only the host writes, when it hands out the results of a step: nothing is
added to what runs on the device.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from sglang_patches import hooks
from sglang_patches.rank.model_facts import get_facts

REQUESTED_IN = "EEP_STEP_RECORD"
_file: int | None = None


def register() -> None:
    if os.environ.get(REQUESTED_IN):
        hooks.hook("managers.scheduler.Scheduler.process_batch_result", _write_down, "before")


def describe_step(rank: int, batch: Any, result: Any) -> dict[str, Any]:
    """A step as the record has it: of each row the request, and how many tokens it had before."""
    mode = batch.forward_mode
    return {
        "at": time.monotonic(),
        "rank": rank,
        "kind": "decode" if mode.is_decode() else "extend" if mode.is_extend() else "idle",
        "graph": bool(getattr(result, "can_run_cuda_graph", False)),
        "rows": [[request.rid, len(request.output_ids)] for request in batch.reqs],
    }


def _write_down(scheduler: Any, batch: Any, result: Any, *_: Any, **__: Any) -> None:
    """Hooks come first in line, so the newest token is not among the tokens of a request yet."""
    global _file
    rank = get_facts().rank
    if _file is None:
        folder = os.environ[REQUESTED_IN]
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _file = os.open(f"{folder}/{rank}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # One write a line: a rank that is killed leaves whole lines.
    os.write(_file, json.dumps(describe_step(rank, batch, result)).encode() + b"\n")
