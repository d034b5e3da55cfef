"""SGLang's own parser with the plugin loaded: without the flag nothing changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

_PARSE = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
prepare_server_args(sys.argv[1:])
"""


def run_python(code: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_triton_takes_tokens_that_are_quantised_already() -> None:
    """By the name of our backend SGLang finds none of its kernels that do; with the hook it finds them, and only those."""
    code = """
from sglang_patches import cpu, hooks
from sglang_patches.rank import dispatcher
cpu.fill_gaps()
from sglang.srt.layers.moe.moe_runner import triton
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
assert FusedOpPool.get_fused_func("mooncake", "triton") is None
hooks.hook("layers.moe.moe_runner.base.FusedOpPool.get_fused_func", dispatcher._kernels_in_one)
hooks.apply()
assert FusedOpPool.get_fused_func("mooncake", "triton") is triton.fused_experts_none_to_triton
assert FusedOpPool.get_fused_func("mooncake", "deep_gemm") is None
"""
    done = run_python(code, EEP_CPU_GAPS="1", SGLANG_USE_CPU_ENGINE="1")
    assert done.returncode == 0, done.stderr[-2000:]


_COMPARE = """
import json, os, pkgutil, sys, types
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
parsed = prepare_server_args(sys.argv[1:])
loaded = sorted(name for name in sys.modules if name.startswith("sglang.srt"))
environment = {name: value for name, value in os.environ.items() if name != "SGLANG_PLUGINS"}

# All that the plugin would hook is imported, and then nothing in SGLang may be of the plugin's making.
from sglang_patches import cpu, sglang_version, targets
cpu.fill_gaps()  # for both: without it there is nothing to import on a machine without a GPU
for target in targets.TARGETS:
    if target.is_in(sglang_version.installed()) and not target.on_gpu:
        pkgutil.resolve_name(targets.full_name(target.name))

def is_ours(value):
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if not isinstance(value, types.FunctionType):
        return str(type(value).__module__).startswith("sglang_patches")
    code = value.__code__
    return "sglang_patches" in code.co_filename or code.co_qualname.startswith("_wrap_fn.")

ours = set()
for name, module in list(sys.modules.items()):
    if name.startswith("sglang."):
        for attribute, value in list(vars(module).items()):
            if is_ours(value):
                ours.add(f"{name}.{attribute}")
            if isinstance(value, type) and value.__module__ == name:
                ours.update(f"{name}.{attribute}.{each}" for each, held in list(vars(value).items()) if is_ours(held))
print("RESULT", json.dumps([repr(parsed), loaded, environment, sorted(HookRegistry._patched), sorted(ours)]))
"""


@pytest.mark.timeout(600)  # SGLang is imported twice
def test_without_the_flag_nothing_changes(sglang: None, model: Path) -> None:
    """The same arguments with the plugin and with plugins turned off: the same result, the same modules, the same
    environment, and of all names in SGLang only those of the command line are hooked."""
    # Version 0.5.17 would draw a seed each time.
    argv = ["--model-path", str(model), "--device", "cpu", "--tp-size", "2", "--random-seed", "1"]

    def outcome(plugins: str) -> list[Any]:
        result = run_python(_COMPARE, *argv, SGLANG_PLUGINS=plugins)
        line = next((line for line in result.stdout.splitlines() if line.startswith("RESULT")), None)
        assert line is not None, result.stderr[-3000:]
        found: list[Any] = json.loads(line.removeprefix("RESULT"))
        return found

    with ThreadPoolExecutor(2) as both:
        ours, stock = both.map(outcome, ("eep", "none-of-this-name"))
    command_line = {f"sglang.srt.server_args.ServerArgs.{name}" for name in ("add_cli_args", "from_cli_args")}
    assert ours[:3] == stock[:3]
    assert (set(ours[3]), stock[3]) == (command_line, [])
    assert set(ours[4]) == {*stock[4], *command_line}, "beside those that stand in for what a CPU has not"


def test_our_flags_need_the_first_of_them(sglang: None, model: Path) -> None:
    result = run_python(_PARSE, "--model-path", str(model), "--eep-max-ranks", "8")
    assert result.returncode != 0
    assert "--ep-backend eep" in result.stderr
