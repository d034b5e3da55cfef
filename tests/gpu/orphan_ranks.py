"""Two ranks on one GPU. The second leaves work on it whenever it is killed; the first sees whether that does any harm."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from eep.control.member import Member, NoDataPlane
from eep.data_plane.device_files import open_device_files

SECONDS_OF_WORK = 0.6
"""Under MPS a kill with 0.15 s of work outstanding or more ends every process of the GPU, unless the files are held."""


class DevicePlane(NoDataPlane):
    """Shares no memory, only the GPU."""

    def __init__(self) -> None:
        self.device_files = open_device_files()
        if not self.device_files:
            raise RuntimeError("a process with a GPU should have files of its driver open")


def main() -> None:
    left, right, product = (torch.randn(4096, 4096, device="cuda") for _ in range(3))
    torch.mm(left, right, out=product)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        torch.mm(left, right, out=product)
    torch.cuda.synchronize()
    often = round(SECONDS_OF_WORK * 20 / (time.perf_counter() - began))
    member = Member.connect(DevicePlane())
    member.ready()
    busy = Path(os.environ["EEP_CONTROL_DIR"]) / f"busy-{member.rank}-{member.incarnation}"
    while member.boundary() is not None:
        for _ in range(often if member.rank == 1 else 1):
            torch.mm(left, right, out=product)
        busy.touch()
        torch.cuda.synchronize()  # raises, and ends this rank, if MPS has ended all
