"""What a rank process runs: SGLang's scheduler, from arguments that the controller wrote down.

The first life of a rank and every later one start from the same file, so a relaunched scheduler connects to the
endpoints that the one before it used: those are bound by the controller, the tokenizer and the detokenizer.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from eep.control.launch.processes import INCARNATION, RANK
from eep.control.private_directory import CONTROL_DIRECTORY
from sglang_patches import recipe, targets

ENTRY = "sglang_patches.rank.rank_process:main"


class LoadedReport:
    """Where a scheduler says that it is loaded. The controller waits for the first word of each rank."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, info: object) -> None:
        recipe.write(self._path, info)

    def close(self) -> None:
        pass


def recipe_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def info_path(directory: Path, rank: int) -> Path:
    return directory / f"loaded-{rank}.json"


def main() -> None:
    directory, rank = Path(os.environ[CONTROL_DIRECTORY]), int(os.environ[RANK])
    written = recipe.read(recipe_path(directory, rank))
    os.environ.update(written["environment"])
    from sglang_patches import cpu, progress_bars

    if cpu.is_asked_for():
        cpu.fill_gaps()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    progress_bars.leave_no_lock()
    _outlive_the_parent()
    arguments = list(written["arguments"])
    arguments[written["writer"]] = LoadedReport(info_path(directory, rank))
    _restore_model_config(arguments[0])
    from sglang.srt.managers.scheduler import run_scheduler_process

    print(f"eep: rank {rank} starts as incarnation {os.environ[INCARNATION]}, process {os.getpid()}", flush=True)
    run_scheduler_process(*arguments, **written["named"])
    # It returns after an exception too, which it has logged; only a rank that was told to end may end cleanly.
    raise SystemExit(1)


def _restore_model_config(server_args: Any) -> None:
    """Up to version 0.5.18 SGLang cannot make this one again itself: once they are resolved, its arguments are sealed."""
    if targets.numbers(targets.installed_version()) < (0, 5, 19):
        from sglang.srt.configs.model_config import ModelConfig

        object.__setattr__(server_args, "model_config", ModelConfig.from_server_args(server_args))


def _outlive_the_parent() -> None:
    """SGLang has a scheduler die with its parent. Ours is a fork server, which may be replaced; the supervisor's
    keeper ends the ranks when the server goes."""

    def stay(*_: Any, **__: Any) -> None:
        pass

    for module in ("sglang.srt.managers.scheduler", "sglang.srt.utils.common", "sglang.srt.utils"):
        found = importlib.import_module(module)
        if hasattr(found, "kill_itself_when_parent_died"):
            found.kill_itself_when_parent_died = stay  # type: ignore[attr-defined]
