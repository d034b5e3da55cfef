"""Everything that a rank imports (:mod:`.rank_imports`), for a fork server: it imports once what the ranks then need not.

Nothing here may start a thread or open a device: neither survives a fork. If an import opens a GPU all the same, the fork
server starts over and imports nothing.
"""

from __future__ import annotations

import importlib
import os
import subprocess

from sglang_patches import cpu
from sglang_patches.cuda import unopened_devices
from sglang_patches.server import launcher

IMPORTS = "sglang_patches.server.rank_imports"


def _import_all() -> None:
    if cpu.is_asked_for():
        importlib.import_module(IMPORTS)
        return
    try:
        unopened_devices.answer_unopened()
    except (OSError, subprocess.TimeoutExpired) as error:
        unopened_devices.start_over(f"the GPUs do not answer: {error}")
    importlib.import_module(IMPORTS)
    if unopened_devices.has_opened():
        unopened_devices.start_over("importing SGLang has opened a GPU")


launcher.end_with_parent()
if unopened_devices.STARTED_OVER not in os.environ:
    _import_all()
