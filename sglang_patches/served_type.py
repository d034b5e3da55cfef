"""A model that is built in the type of its checkpoint, whatever ``--dtype`` says, is built in the type to serve.

Installed also for a single rank without ``--ep-backend eep``, to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_patches import hooks


def register() -> None:
    hooks.hook("models.gpt_oss.GptOssForCausalLM.__init__", _in_served_type)


def _in_served_type(original: Callable[..., None], model: Any, config: Any, *arguments: Any, **named: Any) -> None:
    """gpt-oss makes its attention and its gate so. SGLang makes the type to serve torch's default while it builds a model."""
    config.dtype = torch.get_default_dtype()
    original(model, config, *arguments, **named)
