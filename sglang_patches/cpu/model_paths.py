"""What models need on SGLang's torch-native path and do not find there, with ``--ep-backend eep`` and without."""

from __future__ import annotations

from sglang_patches import served_type
from sglang_patches.cpu import latent_attention, sinks

_registered = False


def register() -> None:
    """A second call does nothing: a process may be forked from one that has done it."""
    global _registered
    if not _registered:
        latent_attention.register()
        sinks.register()
        served_type.register()
        _registered = True
