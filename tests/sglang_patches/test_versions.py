"""What differs between versions of SGLang, as far as it can be checked without a server of each."""

from __future__ import annotations

import contextlib
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_patches import options
from sglang_patches.cpu import native_path
from sglang_patches.server import launcher
from tests.sglang_patches.test_targets import ROOT, VERSIONS, WHEELS, sources


def pins(lines: list[str]) -> dict[str, str]:
    """The exact versions among requirements."""
    found = (re.match(r"([A-Za-z0-9_.-]+)==([^\s;]+)", line.strip()) for line in lines)
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def asked_for(wheel: Path) -> dict[str, str]:
    """What a wheel pins."""
    with zipfile.ZipFile(wheel) as opened:
        name = next(name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        lines = opened.read(name).decode().splitlines()
    return pins([line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")])


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_installed_on_a_cpu_is_what_sglang_asks_for(version: str) -> None:
    sources(version)  # downloads the wheel
    wanted = asked_for(next(WHEELS.glob(f"sglang-{version}-*.whl")))
    listed = (ROOT / "sglang_patches" / "cpu" / f"requirements-{version}.txt").read_text().splitlines()
    common = (ROOT / "sglang_patches" / "cpu" / "requirements.txt").read_text().splitlines()
    ours = pins(listed)
    assert {name: wanted[name] for name in ours if name in wanted} == {
        name: ours[name] for name in ours if name in wanted
    }
    assert {"transformers", "xgrammar"} <= ours.keys() & wanted.keys()
    assert pins(common) == {}, "a version that is pinned for all would be that of one of them"


def test_pinned_memory_is_not_asked_for_on_a_cpu() -> None:
    real, made = torch.tensor, []
    native_path._prepare_mlp_sync_batch(lambda batch: made.append(torch.tensor([batch], pin_memory=True)), 7)
    assert made[0].tolist() == [7]
    assert not made[0].is_pinned()
    with pytest.raises(ZeroDivisionError):
        native_path._prepare_mlp_sync_batch(lambda batch: 1 / 0, 7)
    assert torch.tensor is real


class Moe:
    """The part of SGLang's configuration that says whether there is an elastic backend."""

    elastic_ep_backend: str | None = None

    @contextlib.contextmanager
    def override(self, elastic_ep_backend: str) -> Iterator[None]:
        self.elastic_ep_backend = elastic_ep_backend
        try:
            yield
        finally:
            self.elastic_ep_backend = None


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_controller_is_left_to_start_the_schedulers(is_ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moe, context = Moe(), ModuleType("sglang.srt.runtime_context")
    monkeypatch.setattr(context, "get_exec", lambda: SimpleNamespace(moe=moe), raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setattr(options, "current", lambda: options.ServerOptions(ranks=4, max_ranks=4) if is_ours else None)

    def original(cls: type, *arguments: Any, **named: Any) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
        return moe.elastic_ep_backend is not None, arguments, named

    assert launcher._launch_scheduler_processes(original, Moe, 1, two=2) == (is_ours, (1,), {"two": 2})
    assert moe.elastic_ep_backend is None
