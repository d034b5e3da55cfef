"""What models need on SGLang's torch-native path and do not find there, with ``--ep-backend eep`` and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_patches import hooks
from sglang_patches.cpu import latent_attention, sinks

_registered = False


def register() -> None:
    """A second call does nothing: a process may be forked from one that has done it."""
    global _registered
    if not _registered:
        latent_attention.register()
        sinks.register()
        hooks.hook("models.gpt_oss.GptOssForCausalLM.__init__", _in_served_type)
        _registered = True


def _in_served_type(original: Callable[..., None], model: Any, config: Any, *arguments: Any, **named: Any) -> None:
    """This model makes its attention and its gate in the type of the checkpoint, whatever ``--dtype`` says. SGLang makes the
    type to serve in torch's default while it builds a model."""
    config.dtype = torch.get_default_dtype()
    original(model, config, *arguments, **named)
