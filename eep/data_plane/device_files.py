"""The files of the GPU driver that a process has open.

When the last holder of these files is gone, the driver takes away what the process had on the GPU, its programs included. A
process that is killed leaves kernels behind which still run. On a GPU of its own the driver stops them first. Under MPS it
does not: after about 0.15 s they fetch instructions that are no longer there, and MPS ends every process of that GPU
(bench/results/kills-under-mps.md). While another process holds the files, such kernels come to their end.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MOST = 32
"""The oldest of them keep the driver from taking the process apart. A process has some dozens, and a host many processes."""
_DRIVER = "/dev/nvidia"


def open_device_files(descriptors: Path = Path("/proc/self/fd"), driver: str = _DRIVER) -> tuple[int, ...]:
    """The descriptors of this process that are files of the driver, the oldest first."""
    found: list[int] = []
    for each in descriptors.iterdir():
        with suppress(OSError):  # it is closed meanwhile
            if os.readlink(each).startswith(driver):
                found.append(int(each.name))
    return tuple(sorted(found)[:MOST])
