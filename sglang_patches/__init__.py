"""The SGLang plugin: ``--ep-backend eep``.

SGLang calls :func:`register` in every process that it prepares (entry-point group ``sglang.srt.plugins``). Without the flag
all it does is to add the flags to the command line. With it, the hooks of one module per area of SGLang are installed, and a
version of SGLang that lacks one of their targets is refused at the start.
"""

from __future__ import annotations

import sys


def register() -> None:
    """The entry point. SGLang logs and forgets ordinary exceptions of a plugin, so what must stop it is SystemExit."""
    from sglang_patches import cpu, hooks, installation, options, targets
    from sglang_patches.cuda import float32
    from sglang_patches.server import flags, launcher

    if options.current() is not None:
        installation.install_all()
    elif launcher.is_child():
        pass  # of a server without the flag
    elif any(each == "--ep-backend" or each.startswith("--ep-backend=") for each in sys.argv):
        # Before anything is hooked: a version that we do not know must not get as far as "unrecognized arguments".
        targets.require_supported()
        flags.register()
    else:
        flags.register()
        if cpu.is_asked_for():
            launcher.prepare_cpu()
        elif float32.is_requested():
            float32.prepare()
            float32.register()
            hooks.apply()
