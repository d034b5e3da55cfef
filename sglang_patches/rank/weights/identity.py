"""Which weights a rank has: of which files, loaded by which code, in which form."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

import eep
from sglang_patches import options, sglang_version

_FORMS = (
    *("dtype", "quantization", "load_format", "revision", "tp_size", "dp_size", "ep_size", "device"),
    *("moe_runner_backend", "attention_backend", "ep_num_redundant_experts", "model_loader_extra_config"),
)
"""The arguments of SGLang on which it depends what a loaded tensor looks like."""


def identity_of(model_config: Any) -> str:
    """Two lives of a rank with the same identity load the same."""
    from sglang.srt.runtime_context import get_server_args

    path, arguments, asked = Path(model_config.model_path), get_server_args(), options.required()
    files = sorted(each for each in path.glob("*") if each.suffix in (".safetensors", ".json", ".bin", ".pt"))
    facts = {
        "model": str(path),
        "files": [(each.name, (stat := each.stat()).st_size, stat.st_mtime_ns) for each in files],
        "code": [sglang_version.installed(), torch.__version__, _own_version()],
        "form": {name: str(getattr(arguments, name, None)) for name in _FORMS},
        "slots": [asked.ranks, asked.max_ranks, asked.redundant_experts, asked.most_slots, len(asked.own_ranks)],
    }
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _own_version() -> str:
    try:
        return importlib.metadata.version("eep")
    except importlib.metadata.PackageNotFoundError:  # run from its source tree
        return str(Path(eep.__file__).parent)
