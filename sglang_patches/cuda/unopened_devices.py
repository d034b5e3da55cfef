"""Lets SGLang be imported on a machine with GPUs without opening one, so that processes can be forked afterwards.

A process that has opened a GPU cannot be forked: its child could not use the GPU. SGLang asks for the kind of the GPU while
it is imported, and torch opens the GPU to answer. Here another process opens it (:mod:`.device_query`), and torch's functions
answer from what that one found, until this process, or one that is forked from it, opens the GPU for its work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_patches.cuda import device_query

_ANSWERS_WITHIN = 60.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
STARTED_OVER = "EEP_IMPORTS_OPEN_GPU"
"""A variable of a fork server that has imported nothing, because an import has opened a GPU."""


def answer_unopened() -> None:
    """From now on torch tells of the GPUs without opening one."""
    import torch

    facts = _ask()
    visible = os.environ.get(_VISIBLE)
    is_over = False

    def knows() -> bool:
        nonlocal is_over
        if not is_over:  # the kernels of a step ask too, and should not wait for more than a look at this
            is_open: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            is_over = is_open or os.environ.get(_VISIBLE) != visible
        return not is_over

    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(**facts[_index(device)])

    def capability(device: Any = None) -> tuple[int, int]:
        found = properties(device)
        return found.major, found.minor

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: bool(facts),
        "device_count": lambda: len(facts),
        "current_device": lambda: 0,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties(device).name,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _unless(knows, answer, getattr(torch.cuda, name)))
    # By this torch finds which module stands for the kind of device that there is.
    kind = _unless(knows, lambda: torch.device("cuda"), torch._C._get_accelerator)
    torch._C._get_accelerator = kind


def has_opened() -> bool:
    """Whether this process has opened a GPU, or only asked the driver for one."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                return True
        except OSError:
            pass  # the descriptor by which the folder was listed
    return False


def start_over(why: str) -> None:
    """Run this program again, as one that is to import nothing. Its children import what they need, each for itself."""
    print(f"eep: {why}, so each process imports SGLang for itself", file=sys.stderr, flush=True)
    os.execve(sys.executable, sys.orig_argv, {**os.environ, STARTED_OVER: "1"})


def _ask() -> list[dict[str, Any]]:
    command = [sys.executable, "-I", device_query.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWERS_WITHIN, check=False)
    if done.returncode:
        raise OSError(f"the GPUs cannot be asked for: {done.stderr.strip().splitlines()[-1:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _unless(knows: Callable[[], bool], answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*arguments: Any, **named: Any) -> Any:
        return (answer if knows() else original)(*arguments, **named)

    return ask


def _index(device: Any) -> int:
    """Of a device as torch's functions take it: a number, a name such as ``cuda:1``, a ``torch.device``, or None."""
    import torch

    if isinstance(device, int):
        return max(device, 0)
    return 0 if device is None else torch.device(device).index or 0
