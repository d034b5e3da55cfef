"""What the processes of a server hold, all of them together: whatever leaks grows here."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eep.drill.sglang_server import Server


@dataclass(frozen=True)
class Holdings:
    processes: int
    descriptors: int
    host_mib: float
    """The memory that only one of them has, and a part of what they share (PSS)."""
    mappings: int
    """Pieces of address space: each piece of device memory that is mapped is one."""
    shared_mib: float
    """Files in shared memory."""
    device_mib: int | None
    """Of the whole GPU; None without one."""


def holdings_of(server: Server) -> Holdings:
    descriptors = mappings = processes = 0
    host_kib = 0
    for pid in server.processes():
        place = Path(f"/proc/{pid}")
        with suppress(OSError):  # it has ended since
            descriptors += len(os.listdir(place / "fd"))
            mappings += len((place / "maps").read_text().splitlines())
            host_kib += _pss_kib(place)
            processes += 1
    shared = sum(each.stat().st_blocks * 512 for each in Path("/dev/shm").rglob("*") if each.is_file())
    return Holdings(processes, descriptors, round(host_kib / 1024, 1), mappings, round(shared / 2**20, 1), device_mib())


def _pss_kib(place: Path) -> int:
    for line in (place / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def device_mib() -> int | None:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError):
        return None
