"""A command line as SGLang parses it, for tests of the flags."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

GOOD: dict[str, Any] = {
    "device": "cpu",
    "tp_size": 4,
    "dp_size": 4,
    "ep_size": 4,
    "pp_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "enable_dp_attention": True,
    "disable_overlap_schedule": False,
    "moe_a2a_backend": "none",
    "ep_num_redundant_experts": 0,
    "moe_dense_tp_size": None,
    "enable_dp_lm_head": False,
    "enable_dp_attention_local_control_broadcast": False,
    "disable_custom_all_reduce": False,
    "disable_hybrid_swa_memory": False,
    "disable_radix_cache": False,
    "disable_shared_experts_fusion": False,
    "max_running_requests": None,
    "max_queued_requests": None,
    "eep_max_ranks": None,
    "eep_timeout_ms": None,
    "eep_repair_timeout_s": None,
    "eep_stall_timeout_s": None,
    "eep_hang_timeout_s": None,
    "eep_portion_tokens": None,
    "eep_redundant_experts": None,
    "eep_backup": None,
    "eep_staged_experts": None,
    "eep_shadow_copies": None,
    "eep_store": None,
    "eep_store_user": None,
    "eep_store_password_file": None,
    "eep_store_ca": None,
    "eep_store_cert": None,
    "eep_store_key": None,
    "eep_instance": None,
    "eep_address": None,
    "eep_key_file": None,
    "eep_provider": None,
    "eep_host_timeout_s": None,
    "eep_on_lost_coverage": None,
    "eep_mask_after_ms": None,
    "eep_room_ranks": None,
    "eep_relaunch": None,
    "eep_faults": None,
    "eep_spares": None,
    "eep_keep_context": None,
    "eep_keep_weights": None,
    "eep_anchor": None,
    "eep_kv_backup": None,
    "eep_watch_devices": None,
    "eep_reactions": None,
}


def given(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**GOOD, **changes})


def with_model(folder: Path, configuration: dict[str, Any], **changes: Any) -> argparse.Namespace:
    (folder / "config.json").write_text(json.dumps(configuration))
    return given(model_path=str(folder), **changes)
