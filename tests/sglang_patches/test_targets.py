"""Every name that the plugin hooks exists in the versions that it says it supports: checked against their wheels."""

from __future__ import annotations

import ast
import fcntl
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang_patches import sglang_version, target_check, targets

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "build" / "wheels"
VERSIONS = ("0.5.17", "0.5.21", "0.5.23")
PARTS = ("sglang/srt/", "sglang/kernels/")
"""What is unpacked."""


def sources(version: str) -> Path:
    """The package of that version, downloaded once and unpacked, whatever other processes ask for it meanwhile."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    with (WHEELS / f"sglang-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _sources(version)


def _sources(version: str) -> Path:
    unpacked = WHEELS / f"sglang-{version}"
    if not all((unpacked / each).is_dir() for each in PARTS):
        found = next(WHEELS.glob(f"sglang-{version}-*.whl"), None)
        if found is None:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", WHEELS, f"sglang=={version}"]
            try:
                said = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False).stderr
            except subprocess.TimeoutExpired as error:
                said = str(error)
            found = next(WHEELS.glob(f"sglang-{version}-*.whl"), None)
            if found is None:
                pytest.skip(f"the wheel of SGLang {version} could not be downloaded: {said.strip()[-300:]}")
        partly = WHEELS / f"sglang-{version}-partly"
        for before in (partly, unpacked):
            shutil.rmtree(before, ignore_errors=True)
        with zipfile.ZipFile(found) as wheel:
            wheel.extractall(partly, [name for name in wheel.namelist() if name.startswith(PARTS)])
        partly.rename(unpacked)
    return unpacked / "sglang"


@pytest.mark.parametrize("version", VERSIONS)
def test_all_targets_exist(version: str) -> None:
    assert target_check.missing(version, sources(version)) == []


def test_a_missing_target_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [
        targets.HookTarget("managers.scheduler.Scheduler.no_such_method", "a test"),
        targets.HookTarget("managers.no_such_module.thing", "a test"),
        targets.HookTarget("managers.scheduler.run_scheduler_process", "a test", ("no_such_parameter",)),
    ]
    monkeypatch.setattr(targets, "TARGETS", gone)
    found = target_check.missing(VERSIONS[1], sources(VERSIONS[1]))
    assert len(found) == 3
    assert "no name no_such_method" in found[0]
    assert "no_such_module" in found[1]
    assert "no parameter no_such_parameter" in found[2]


def test_the_plugin_refuses_a_version_that_lacks_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    monkeypatch.setattr(targets, "TARGETS", [targets.HookTarget("managers.scheduler.no_such_name", "a test")])
    with pytest.raises(SystemExit, match=re.escape(sglang_version.installed()) + ".*no_such_name"):
        target_check.require_supported()


def test_a_target_may_be_for_some_versions_only() -> None:
    old = targets.HookTarget("layers.moe.utils.MoeA2ABackend.is_deepep", "a test", until="0.5.18")
    assert old.is_in("0.5.17")
    assert old.is_in("0.5.17.post1")
    assert not old.is_in("0.5.18")


def test_every_hook_is_in_the_table() -> None:
    """Hooks are given by literals, or by one of two prefixes and a literal."""
    prefixes = {"_CONTROLLER": targets._CONTROLLER, "_MANAGER": targets._MANAGER}
    known = {target.name for target in targets.TARGETS}
    seen = 0
    for file in (ROOT / "sglang_patches").rglob("*.py"):
        constants = dict(prefixes)
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.targets[0], ast.Name)
            ):
                constants.setdefault(node.targets[0].id, node.value.value)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hooks.hook", "hooks.rebind"):
                name = eval(compile(ast.Expression(node.args[0]), str(file), "eval"), {}, constants)
                assert name in known, f"{file.name} hooks {name}, which the table does not have"
                seen += 1
    assert seen > 20
