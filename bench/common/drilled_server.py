"""What benchmarks share that drive a checked load against a server while its ranks are lost."""

from __future__ import annotations

import importlib.metadata
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eep.drill.devices import Device
from eep.drill.load import Load
from eep.drill.token_certainty import clear_prompts

RESULTS = Path(__file__).resolve().parents[1] / "results"
PROMPTS = 8


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}" if text else "", flush=True)


def choose_prompts(url: str, choose: random.Random, tokens: int, device: Device) -> list[list[int]]:
    """Some of whose answers of so many tokens the model is sure."""
    candidates = [[choose.randrange(3, 250) for _ in range(choose.randrange(4, 40))] for _ in range(4 * PROMPTS)]
    return clear_prompts(url, candidates, PROMPTS, tokens, continued=device.shared)


def describe_server(device: Device, arguments: Sequence[str]) -> dict[str, Any]:
    """For the setting of a run."""
    return {"sglang": importlib.metadata.version("sglang"), "server": [*device.flags, *arguments]}


def describe_requests(load: Load) -> dict[str, int]:
    return {"answered": len(load.answers), "failed": len(load.failed), "wrong": len(load.wrong)}


def exit_code(load: Load, left: Sequence[str]) -> int:
    """0 only if no request failed, no token was wrong and nothing was ``left`` over. Says what did."""
    for problem in [*(answer.problem for answer in load.failed), *(f"left over: {each}" for each in left)]:
        say(problem)
    return int(bool(load.failed or load.wrong or left))


def origin_lines(head: dict[str, Any]) -> list[str]:
    """Where the figures of a page come from."""
    setting, machine = head["setting"], head["machine"]
    return [
        f"`{head['command']}`, commit {head['commit']}, {head['date']}.",
        f"{machine['gpu'] + ', ' if 'gpu' in machine else ''}{machine['cpu']}, {machine['cores']} cores; Python "
        f"{machine['python']}, torch {machine['torch']}, SGLang {setting['sglang']}.",
    ]
