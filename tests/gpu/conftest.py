"""Tests that need a GPU; elsewhere they are skipped, and say so. ``make test-gpu`` runs them, with MPS and without; those
of the SGLang server, ``make test-gpu-sglang``."""

from __future__ import annotations

import os
import pathlib

import pytest
import torch

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = (
        None if torch.cuda.is_available() else "needs a CUDA device: 'make test-gpu' or 'make test-gpu-sglang' there"
    )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if "CUDA_MPS_PIPE_DIRECTORY" in os.environ and item.get_closest_marker("without_mps"):
                item.add_marker(pytest.mark.skip(reason="kills ranks, which needs a GPU without MPS: 'make test-gpu'"))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
