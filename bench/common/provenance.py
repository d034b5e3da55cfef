"""Where figures come from: the command, the commit and the machine, as plain values for a JSON file.

They are enough to judge and repeat a measurement, and do not say whose machine it was: no host, user or path
names.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PLACES = ("--out", "--results")


def provenance() -> dict[str, Any]:
    """Everything below in one dictionary, for the head of a results file."""
    return {
        "command": command_line(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
    }


def command_line() -> str:
    """The command to type in the root of the checkout, without the folder that the files went to."""
    script = pathlib.Path(sys.argv[0]).resolve()
    return shlex.join(["python", *_named(script), *_without(sys.argv[1:], _PLACES)])


def _named(script: pathlib.Path) -> list[str]:
    """How Python is told what to run: a benchmark is the module of its folder."""
    if not script.is_relative_to(_ROOT / "bench"):
        return [str(script.relative_to(_ROOT) if script.is_relative_to(_ROOT) else script.name)]
    module = ".".join(script.relative_to(_ROOT).with_suffix("").parts)
    return ["-m", module.removesuffix(".__main__")]


def _without(arguments: list[str], options: tuple[str, ...]) -> list[str]:
    kept, given = [], iter(arguments)
    for each in given:
        if each in options:
            next(given, None)
        elif not each.startswith(tuple(f"{option}=" for option in options)):
            kept.append(each)
    return kept


def commit() -> str:
    """The commit that is checked out; "-dirty" when what is measured may differ from it.

    Where the sources are a copy without history, the environment variable EEP_COMMIT may name it.
    """
    if said := os.environ.get("EEP_COMMIT"):
        return said
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    # A benchmark writes results while it measures, so they do not count as a change.
    changed = _git("status", "--porcelain", "--", ".", ":!bench/results")
    return f"{head}-dirty" if changed else head


def machine() -> dict[str, Any]:
    """The machine, its software, and how busy it is."""
    import torch

    gpu = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        **({"gpu": gpu.splitlines()[0]} if gpu else {}),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """The name that the maker gave the processor; on ARM only lscpu knows it."""
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    said = _output("lscpu") or ""
    for line in said.splitlines():
        if line.startswith("Model name:"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _git(*arguments: str) -> str | None:
    return _output("git", "-C", str(_ROOT), *arguments)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
