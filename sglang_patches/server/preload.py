"""Everything that a rank imports. The fork server imports it once, so that the ranks need not.

Nothing here may start a thread or open a device: neither survives a fork. If an import opens a GPU all the same, the fork
server starts over and imports nothing.
"""

from __future__ import annotations

import importlib
import os
import subprocess

from sglang_patches import cpu
from sglang_patches.cuda import unopened_devices
from sglang_patches.server import launcher

MODULES = (
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
)


def _import_all() -> None:
    if cpu.is_asked_for():
        cpu.fill_gaps()
    else:
        try:
            unopened_devices.answer_unopened()
        except (OSError, subprocess.TimeoutExpired) as error:
            unopened_devices.start_over(f"the GPUs do not answer: {error}")
    for module in MODULES:
        importlib.import_module(module)
    launcher.become_child()
    if not cpu.is_asked_for() and unopened_devices.has_opened():
        unopened_devices.start_over("importing SGLang has opened a GPU")


launcher.end_with_parent()
if unopened_devices.STARTED_OVER not in os.environ:
    _import_all()
