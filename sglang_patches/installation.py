"""Installs all the hooks that ``--ep-backend eep`` needs, from one module for each area of SGLang.

Only this module imports those, by their names: they import SGLang.
"""

from __future__ import annotations

import importlib

from sglang_patches import cpu, hooks, target_check

AREAS = (
    "rank.process_groups",
    "rank.layer_slots",
    "rank.dispatcher",
    "rank.gpt_oss_block",
    "rank.weight_loader",
    "rank.kv.pool_hooks",
    "rank.kv.context_notes",
    "rank.kv.own_prefix",
    "rank.kv.cache_room",
    "rank.scheduler_step",
    "rank.warm_up",
    "rank.late_sockets",
    "rank.step_record",
    "rank.failure",
    "server.launcher",
    "server.private_sockets",
    "server.controller",
    "server.detokenizer",
    "server.sent_text",
    "front_end.tokenizer_hooks",
    "front_end.broadcasts",
    "front_end.route_guard",
    "rank.receipt",
    "rank.role",
    "rank.detokenizer_link",
    "front_end.server_end",
    "api.mounting",
    "rank.resumption",
    "sampling.seeds",
)
"""The modules with a ``register()``, in the order in which they are installed."""
GPU_AREAS = ("cuda.alignment", "cuda.routers", "cuda.gpu_sharing", "cuda.float32", "cuda.graphs")
"""More modules, for ranks on a GPU. On a CPU it is ``cpu.native_path``."""
_installed = False


def install_all() -> None:
    """Install everything in this process. A second call does nothing."""
    global _installed
    if _installed:
        return
    target_check.require_supported()
    if cpu.is_asked_for():
        cpu.fill_gaps()
    for area in (*AREAS, *(("cpu.native_path",) if cpu.is_asked_for() else GPU_AREAS)):
        importlib.import_module(f"sglang_patches.{area}").register()
    hooks.apply()
    _installed = True


def install_model_paths() -> None:
    """Install what a rank on a CPU needs without ``--ep-backend eep``, to compare with. A second call does nothing."""
    importlib.import_module("sglang_patches.cpu.model_paths").register()
    hooks.apply()
