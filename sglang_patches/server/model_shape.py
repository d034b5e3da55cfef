"""How many experts a model has, and what it is, asked of its configuration before SGLang has read it."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
_NAMES = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def experts_of(arguments: argparse.Namespace) -> int | None:
    """Of each MoE layer; None where that cannot be told. What is wrong with the model is then for SGLang to say."""
    path = getattr(arguments, "model_path", None)
    if not path:
        return None
    try:
        return count_experts(_configuration(path, arguments))
    except (OSError, ValueError, ImportError) as error:
        logger.warning("the number of experts of %s is not known before it is loaded: %s", path, error)
        return None


def architectures_of(arguments: argparse.Namespace) -> list[str]:
    """As SGLang's registry of models calls them; none where that cannot be told."""
    path = getattr(arguments, "model_path", None)
    try:
        named = _configuration(path, arguments).get("architectures") if path else None
    except (OSError, ValueError, ImportError):
        return []  # a warning says so already
    return [each for each in named if isinstance(each, str)] if isinstance(named, list) else []


def count_experts(configuration: Mapping[str, Any]) -> int | None:
    """In a configuration, or in the part of it that is about text."""
    for part in (configuration, configuration.get("text_config") or {}):
        for name in _NAMES:
            if isinstance(part.get(name), int) and part[name] > 0:
                return int(part[name])
    return None


def _configuration(path: str, arguments: argparse.Namespace) -> Mapping[str, Any]:
    file = Path(path) / "config.json"
    if file.exists():
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"{file} holds no configuration")
        return found
    import transformers

    remote: Any = transformers.AutoConfig
    configuration: Mapping[str, Any] = remote.from_pretrained(
        path,
        revision=getattr(arguments, "revision", None),
        trust_remote_code=bool(getattr(arguments, "trust_remote_code", False)),
    ).to_dict()
    return configuration
