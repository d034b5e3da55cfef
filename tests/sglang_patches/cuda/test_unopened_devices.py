"""What torch tells of GPUs that this process has not opened. There is no GPU here: what another process would find is given,
and a program that starts over says that a GPU is open."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from sglang_patches.cuda import device_query, unopened_devices

FACTS: list[dict[str, Any]] = [
    {"name": "first", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 1 << 37},
    {"name": "second", "major": 10, "minor": 3, "multi_processor_count": 148, "total_memory": 1 << 38},
]
NAMES = (
    *("is_available", "device_count", "current_device"),
    *("get_device_capability", "get_device_properties", "get_device_name"),
)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unopened_devices, "_ask", lambda: FACTS)
    for name in NAMES:
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: f"opened for {name}")
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: "opened")  # and it is put back
    unopened_devices.answer_unopened()


@pytest.mark.usefixtures("answering")
def test_torch_tells_what_another_process_has_found() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_capability(torch.cuda.current_device()) == (9, 0)
    assert [torch.cuda.get_device_name(device) for device in (0, "cuda", "cuda:1", torch.device("cuda", 1))] == [
        *("first", "first", "second", "second"),
    ]
    assert torch.cuda.get_device_properties(1).multi_processor_count == 148
    assert torch.get_device_module() is torch.cuda
    with pytest.raises(AttributeError, match="not_known"):
        _ = torch.cuda.get_device_properties(1).not_known


@pytest.mark.usefixtures("answering")
def test_torch_answers_itself_once_the_device_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert [getattr(torch.cuda, name)() for name in NAMES] == [f"opened for {name}" for name in NAMES]


@pytest.mark.usefixtures("answering")
def test_torch_answers_itself_where_other_devices_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert torch.cuda.device_count() == "opened for device_count"  # type: ignore[comparison-overlap]


def test_a_process_that_cannot_ask_says_why() -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a driver")
    with pytest.raises(OSError, match=device_query.DRIVER):
        unopened_devices._ask()


def test_no_device_is_open_here() -> None:
    assert not torch.cuda.is_available()
    assert not unopened_devices.has_opened()


def test_a_program_starts_over_once_and_keeps_its_descriptors() -> None:
    program = (
        "import os, sys; from sglang_patches.cuda import unopened_devices as ours\n"
        "if ours.STARTED_OVER not in os.environ: ours.start_over('a GPU is open')\n"
        "os.write(int(sys.argv[1]), b'began again')"
    )
    reader, writer = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, str(writer)], pass_fds=[writer], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert os.read(reader, 100) == b"began again"
        assert "a GPU is open, so each process imports SGLang for itself" in done.stderr
    finally:
        os.close(reader)
        os.close(writer)
