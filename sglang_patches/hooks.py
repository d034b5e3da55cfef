"""Installing hooks through SGLang's own registry, and making sure that they took.

The registry logs a hook that cannot be applied and goes on, which would leave a server that looks elastic and is not. So
every hook is checked after it was applied, and the process ends with a sentence if one is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

from sglang_patches import targets

Kind = Literal["before", "after", "around", "replace"]
_wanted: set[str] = set()


def hook(target: str, function: Callable[..., Any], kind: Kind = "around") -> None:
    """Hook ``target``, a dotted name below ``sglang.srt``, at the next :func:`apply`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not targets.exists_in(target, targets.installed_version()):
        return
    name = targets.PREFIX + target
    _wanted.add(name)
    HookRegistry.register(name, function, HookType(kind))


def rebind(target: str, value: object) -> None:
    """Give the name ``target`` another value. For functions that are pickled by name into child processes: a hooked one
    would be looked up there by the name of the original, and found without the hook."""
    module, _, attribute = (targets.PREFIX + target).rpartition(".")
    setattr(importlib.import_module(module), attribute, value)


def apply() -> None:
    """Apply what was registered; ends the process if a hook did not take."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    missing = sorted(_wanted - HookRegistry._patched)
    if missing:
        version = targets.installed_version()
        raise SystemExit(f"--ep-backend eep cannot run on SGLang {version}: hooks could not be installed on {missing}")
