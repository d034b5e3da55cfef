"""The SGLang plugin: ``--ep-backend eep``.

SGLang calls :func:`register` in every process that it prepares (entry-point group ``sglang.srt.plugins``). Without the flag
the plugin only adds its flags to the command line. With it, the plugin installs the hooks of one module per area of SGLang.
It refuses, at the start, a version of SGLang that lacks a name to hook.
"""

from __future__ import annotations

import sys


def register() -> None:
    """The entry point. SGLang logs ordinary exceptions of a plugin and goes on; only SystemExit stops it."""
    from sglang_patches import cpu, hooks, installation, options, target_check
    from sglang_patches.cuda import float32
    from sglang_patches.server import flags, launcher

    if options.current() is not None:
        installation.install_all()
    elif launcher.is_child():
        pass  # its server was started without the flag
    elif any(each == "--ep-backend" or each.startswith("--ep-backend=") for each in sys.argv):
        # Before anything is hooked: else an unknown version would fail with "unrecognized arguments" and no reason.
        target_check.require_supported()
        flags.register()
    else:
        flags.register()
        if cpu.is_asked_for():
            launcher.prepare_cpu()
        elif float32.is_requested():
            float32.prepare()
            float32.register()
            hooks.apply()
