"""Installs hooks through SGLang's own registry, and checks that each of them took.

When the registry cannot apply a hook it logs that and goes on. The server would look elastic and not be. So the process ends
with a message if a hook is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

from sglang_patches import sglang_version, targets

Kind = Literal["before", "after", "around", "replace"]
_wanted: set[str] = set()


def hook(target: str, function: Callable[..., Any], kind: Kind = "around") -> None:
    """Hook ``target``, a name of :mod:`.targets`, at the next :func:`apply`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not targets.exists_in(target, sglang_version.installed()):
        return
    name = targets.full_name(target)
    _wanted.add(name)
    HookRegistry.register(name, function, HookType(kind))


def rebind(target: str, value: object) -> None:
    """Give the name ``target`` another value, in this one module. A hook would follow a function into every module that
    imported it. And a child process would look up a hooked function by the name of the original, without the hook."""
    if not targets.exists_in(target, sglang_version.installed()):
        return
    module, _, attribute = targets.full_name(target).rpartition(".")
    setattr(importlib.import_module(module), attribute, value)


def apply() -> None:
    """Apply what was registered. SystemExit if a hook did not take."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    missing = sorted(_wanted - HookRegistry._patched)
    if missing:
        version = sglang_version.installed()
        raise SystemExit(
            f"--ep-backend eep cannot run on SGLang {version}: it could not hook {', '.join(missing)}; install a version "
            f"from {sglang_version.OLDEST} to {sglang_version.NEWEST}"
        )
