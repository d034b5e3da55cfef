"""What a spare does on a GPU beyond importing: what takes long there and is the same for every rank.

It opens the device of the rank that it is prepared for (``EEP_SPARE_FOR``), as SGLang gave it to the rank's last incarnation.
It may also become a rank on another device, and then opens that one too.
"""

from __future__ import annotations

import os
from pathlib import Path

from eep.control.launch.spare_order import SPARE_FOR
from eep.control.private_directory import CONTROL_DIRECTORY
from sglang_patches import recipe
from sglang_patches.rank import rank_process

ENTRY = "sglang_patches.cuda.spare_preparation:warm"
_GPU_ID = 2
"""Which argument of ``run_scheduler_process`` names the device, in every version."""


def warm() -> None:
    import torch

    from eep.abi import native

    torch.cuda.set_device(gpu_of_rank(Path(os.environ[CONTROL_DIRECTORY]), int(os.environ[SPARE_FOR])))
    square = torch.zeros(16, 16, device="cuda")
    torch.mm(square, square)  # opens cuBLAS too
    torch.cuda.synchronize()
    native.load("cuda")


def gpu_of_rank(directory: Path, rank: int) -> int:
    """The number of the device in the recipe of a rank."""
    gpu = recipe.read(rank_process.recipe_path(directory, rank))["arguments"][_GPU_ID]
    if not isinstance(gpu, int):
        raise RuntimeError(
            f"argument {_GPU_ID} in the recipe of rank {rank} should be the number of its GPU, and is {gpu!r}"
        )
    return gpu
