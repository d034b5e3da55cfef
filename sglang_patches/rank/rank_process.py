"""What a rank process runs: SGLang's scheduler, from arguments that the controller has recorded.

Every incarnation of a rank starts from the same file. So a relaunched scheduler connects to the endpoints that its
predecessor used: the controller, the tokenizer and the detokenizer have bound them.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from eep.control.launch.processes import INCARNATION, RANK
from eep.control.private_directory import CONTROL_DIRECTORY
from eep.observe.metrics import name_metric_files
from sglang_patches import recipe, sglang_version
from sglang_patches.rank import next_life

ENTRY = "sglang_patches.rank.rank_process:main"


class LoadedReport:
    """The pipe on which a scheduler says that it is loaded, as a file. The controller waits for the file of each rank."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, info: object) -> None:
        if not self._path.exists():  # an earlier life of the rank has said the same, and the disk may be full
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
    name_metric_files(f"{'spare' if next_life.is_awaited() else 'rank'}-{rank}")
    progress_bars.leave_no_lock()
    _outlive_the_parent()
    arguments = list(written["arguments"])
    arguments[written["writer"]] = LoadedReport(info_path(directory, rank))
    _restore_model_config(arguments[0])
    from sglang.srt.managers.scheduler import run_scheduler_process

    from sglang_patches.rank import failure

    life = "a spare" if next_life.is_awaited() else f"incarnation {os.environ[INCARNATION]}"
    print(f"eep: rank {rank} starts as {life}, process {os.getpid()}", flush=True)
    run_scheduler_process(*arguments, **written["named"])
    failure.tell_failure()
    # It also returns after an exception, which it has logged. Only a rank that was told to end may end with 0.
    raise SystemExit(1)


def _restore_model_config(server_args: Any) -> None:
    """Up to version 0.5.18 SGLang cannot make this cache again itself: its arguments are sealed once they are resolved."""
    if sglang_version.numbers(sglang_version.installed()) < (0, 5, 19):
        from sglang.srt.configs.model_config import ModelConfig

        object.__setattr__(server_args, "model_config", ModelConfig.from_server_args(server_args))


def _outlive_the_parent() -> None:
    """SGLang makes a scheduler die with its parent. Here the parent is a fork server, which may be replaced. The
    supervisor's keeper ends the ranks when the server ends."""

    def stay(*_: Any, **__: Any) -> None:
        pass

    for module in ("sglang.srt.managers.scheduler", "sglang.srt.utils.common", "sglang.srt.utils"):
        found = importlib.import_module(module)
        if hasattr(found, "kill_itself_when_parent_died"):
            found.kill_itself_when_parent_died = stay  # type: ignore[attr-defined]
