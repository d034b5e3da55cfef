"""Says on which GPU this rank runs, so that a failure of the GPU is known to be one of this rank's."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from eep.hardware.rank_device import write_device

logger = logging.getLogger(__name__)


def tell_device(directory: Path, rank: int, device: str) -> None:
    """Nothing on a CPU, which no rank has to itself."""
    if device == "cpu":
        return
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        write_device(directory, rank, uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except OSError as error:
        logger.warning("eep: rank %d cannot say which GPU it runs on: %s", rank, error)
