"""What SGLang needs on a machine without a GPU and does not find there.

Nothing here replaces a package that is installed. :func:`fill_gaps` runs before SGLang's own modules are imported, and only
for ``--ep-backend eep`` on a CPU, or with ``EEP_CPU_GAPS=1`` (for a single rank without the plugin, to compare with).
"""

from __future__ import annotations

import os

ASKED_FOR = "EEP_CPU_GAPS"
"""The environment variable that asks for it; child processes inherit it."""


def is_asked_for() -> bool:
    return os.environ.get(ASKED_FOR) == "1"


def fill_gaps() -> None:
    """Make SGLang importable without sgl_kernel and without torchvision. A second call does nothing."""
    from sglang_patches.cpu import missing_packages

    missing_packages.provide_sgl_kernel()
    missing_packages.provide_torchvision()
