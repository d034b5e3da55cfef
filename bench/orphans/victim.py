"""Leaves so many milliseconds of work on the GPU and waits to be killed: ``victim MILLISECONDS IS_HELD``.

A child that uses no GPU holds the device files for two seconds more, if they are to be held: what a supervisor does.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from eep.control.supervisor.held_files import HELD_FOR
from eep.data_plane.device_files import open_device_files


def main(milliseconds: int, is_held: bool) -> None:
    left, right, product = (torch.randn(4096, 4096, device="cuda") for _ in range(3))
    torch.mm(left, right, out=product)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        torch.mm(left, right, out=product)
    torch.cuda.synchronize()
    often = max(1, round(milliseconds / 1e3 * 20 / (time.perf_counter() - began)))
    if is_held:
        _hold_in_a_child()
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(often):
        torch.mm(left, right, out=product)
    print("launched", flush=True)
    time.sleep(600)


def _hold_in_a_child() -> None:
    held, parent = set(open_device_files()), os.getpid()
    if os.fork():
        return
    for descriptor in range(os.sysconf("SC_OPEN_MAX")):
        if descriptor not in held:
            try:
                os.close(descriptor)
            except OSError:
                continue
    while os.getppid() == parent:
        time.sleep(0.001)
    time.sleep(HELD_FOR)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), bool(int(sys.argv[2])))
