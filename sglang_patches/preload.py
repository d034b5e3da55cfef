"""Imported by the fork server: everything that a rank imports, so that the ranks do not have to.

Nothing here may start a thread or open a device, since neither survives a fork.
"""

from __future__ import annotations

import sys

from sglang_patches import cpu
from sglang_patches.launcher import end_with_parent

MODULES = (
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
)


def _load() -> None:
    import importlib

    end_with_parent()
    if cpu.is_asked_for():
        cpu.fill_gaps()
    for module in MODULES:
        importlib.import_module(module)
    from sglang.srt.plugins import load_plugins

    load_plugins()


if "pytest" not in sys.modules:
    _load()
