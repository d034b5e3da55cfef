"""Everything that a rank imports, for a process that is to become one."""

from __future__ import annotations

import importlib

from sglang_patches import cpu
from sglang_patches.server import launcher

MODULES = (
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
)

if cpu.is_asked_for():
    cpu.fill_gaps()
for _module in MODULES:
    importlib.import_module(_module)
launcher.become_child()
