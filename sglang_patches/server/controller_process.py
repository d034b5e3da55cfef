"""What the process of the data-parallel controller runs.

It comes from a process that has imported all that a rank needs, still has one thread, and has opened no GPU. So it first
forks the fork server of the ranks, which then need not import SGLang again.
"""

from __future__ import annotations

import os
from typing import Any

from eep.control.launch.fork_server import ForkServerProcess, fork_here
from sglang_patches.cuda import unopened_devices
from sglang_patches.rank import rank_process  # noqa: F401  (the ranks need it)
from sglang_patches.server import launcher

fork_server: ForkServerProcess | None = None
"""The one that was forked here; None where ranks are not forked, or if this process had opened a GPU by then."""


def run(*arguments: Any, **named: Any) -> None:
    global fork_server
    if launcher.FORKED in os.environ and not unopened_devices.has_opened():
        # The server waits for a word on this pipe, or for its end.
        pipes = [each for each in (*arguments, *named.values()) if hasattr(each, "fileno")]
        fork_server = fork_here(close=pipes)
    from sglang.srt.managers.data_parallel_controller import run_data_parallel_controller_process

    run_data_parallel_controller_process(*arguments, **named)
