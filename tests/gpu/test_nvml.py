"""The real NVML, read as the device watch reads it: it knows every GPU, and a machine that is well says nothing alarming."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eep.hardware.nvml_reader import NvmlMissing, NvmlReader
from eep.hardware.reaction_table import Reaction, read_table

pytestmark = pytest.mark.gpu

_NO_CONTEXT = """
from eep.hardware.nvml_reader import NvmlReader
reader = NvmlReader()
reader.look(1.0)
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
assert driver.cuDeviceGetCount(ctypes.byref(count)) == 3, "the driver is initialised in this process"
reader.close()
"""
"""3 is CUDA_ERROR_NOT_INITIALIZED."""


@pytest.fixture
def reader() -> NvmlReader:
    try:
        return NvmlReader()
    except NvmlMissing as error:
        pytest.skip(str(error))


def test_every_gpu_is_watched_by_the_name_that_torch_has_for_it(reader: NvmlReader) -> None:
    import torch

    name = str(torch.cuda.get_device_properties(0).uuid)
    assert (name if name.startswith("GPU-") else f"GPU-{name}") in reader.devices


def test_a_machine_that_is_well_says_nothing_that_ends_a_rank(reader: NvmlReader) -> None:
    table = read_table()
    for _ in range(2):
        found = reader.look(1.0)
        assert [each for each in found if table.reaction_to(each.sign) is not Reaction.NOTE] == []
    reader.close()


@pytest.mark.usefixtures("reader")
def test_reading_makes_no_context() -> None:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", _NO_CONTEXT], env=environment, check=True, timeout=60)
