"""The process that watches the GPUs of this server for failures. The controller keeps it running."""

from __future__ import annotations

import sys
from pathlib import Path

from eep.control.launch.kept_process import KeptProcess
from eep.control.private_directory import PrivateDirectory
from sglang_patches.options import HardwareOptions


def watch_command(directory: Path, wanted: HardwareOptions) -> list[str] | None:
    """None until there is a supervisor to tell."""
    if not PrivateDirectory(directory).socket.exists():
        return None
    command = [sys.executable, "-m", "eep.hardware.device_watch", "--dir", str(directory)]
    return command if wanted.reactions is None else [*command, "--reactions", wanted.reactions]


def start_watching(directory: Path, wanted: HardwareOptions) -> KeptProcess | None:
    """None if devices are not watched."""
    if not wanted.watched:
        return None
    return KeptProcess("device watch", directory, lambda: watch_command(directory, wanted), ends_for_good=True)
