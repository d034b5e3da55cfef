"""How many experts a model has, its architecture and its quantisation, read from its configuration before SGLang does."""

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
    """The number of experts of each MoE layer; None if the configuration does not say. SGLang says what is wrong with it."""
    path = getattr(arguments, "model_path", None)
    if not path:
        return None
    try:
        return count_experts(_configuration(path, arguments))
    except (OSError, ValueError, ImportError) as error:
        logger.warning("the number of experts of %s is not known before SGLang loads the model: %s", path, error)
        return None


def architectures_of(arguments: argparse.Namespace) -> list[str]:
    """As SGLang's registry of models calls them; empty if the configuration does not say."""
    path = getattr(arguments, "model_path", None)
    try:
        named = _configuration(path, arguments).get("architectures") if path else None
    except (OSError, ValueError, ImportError):
        return []  # experts_of has warned of it already
    return [each for each in named if isinstance(each, str)] if isinstance(named, list) else []


def quantisation_of(arguments: argparse.Namespace) -> str | None:
    """How the weights of a checkpoint are quantised, as its configuration calls it; None if it does not say."""
    path = getattr(arguments, "model_path", None)
    try:
        found = _configuration(path, arguments).get("quantization_config") if path else None
    except (OSError, ValueError, ImportError):
        return None  # experts_of has warned of it already
    method = found.get("quant_method") if isinstance(found, dict) else None
    return method if isinstance(method, str) else None


def count_experts(configuration: Mapping[str, Any]) -> int | None:
    """The number of experts in a configuration, or in the part of it that is about text."""
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
            raise ValueError(f"{file} is not the configuration of a model: it holds no JSON object")
        return found
    import transformers

    remote: Any = transformers.AutoConfig
    configuration: Mapping[str, Any] = remote.from_pretrained(
        path,
        revision=getattr(arguments, "revision", None),
        trust_remote_code=bool(getattr(arguments, "trust_remote_code", False)),
    ).to_dict()
    return configuration
