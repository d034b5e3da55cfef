"""CUDA graphs of decode steps: captured while a rank is alone, and replayed in every later view.

A graph holds nothing of the membership. So a rank captures it once, before it joins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_patches import hooks
from sglang_patches.rank import rank_data_plane

_RUNNER = "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner."


def register() -> None:
    hooks.hook(_RUNNER + "capture", _capture)


def _capture(original: Callable[..., None], runner: Any, *arguments: Any, **named: Any) -> None:
    plane = rank_data_plane.get_plane()
    with plane.through(plane.decode_passage):
        original(runner, *arguments, **named)
