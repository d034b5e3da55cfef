"""``python -m bench.orphans`` on a GPU: kills processes with work outstanding, beside one that only looks on.

With MPS and without; with the device files of the killed process held by another, as a supervisor does, and not. The result
goes to ``bench/results/kills-under-mps.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from eep.drill import mps

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "kills-under-mps.json"
SEES_WITHIN = 1.0
"""Seconds after the end of the outstanding work within which the onlooker would have failed."""


@dataclass(frozen=True)
class Kill:
    milliseconds: int
    """How much work is outstanding."""
    is_held: bool
    under_mps: bool = True


@dataclass(frozen=True)
class Outcome:
    kill: Kill
    onlooker_lost: bool
    lost_after_ms: int | None
    gone_after_ms: int
    """When the killed process had ended."""


KILLS = (
    *(Kill(milliseconds, is_held=False) for milliseconds in (10, 50, 80, 110, 140, 170, 220, 600, 600)),
    *(Kill(600, is_held=True) for _ in range(6)),
    *(Kill(600, is_held=False, under_mps=False) for _ in range(3)),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.orphans", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT, help="where the result goes (default: %(default)s)")
    options = parser.parse_args()
    outcomes = [
        outcome for under_mps in (True, False) for outcome in run([k for k in KILLS if k.under_mps == under_mps])
    ]
    options.out.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


def run(kills: Sequence[Kill]) -> list[Outcome]:
    """A loss takes every process of the GPU along, so the rest begins anew after it."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(kills):
        rest = kills[len(outcomes) :]
        nothing: AbstractContextManager[dict[str, str]] = nullcontext({})
        with mps.daemon() if rest[0].under_mps else nothing as variables:
            onlooker = _start(variables, "onlooker")
            victims = [_start(variables, "victim", each.milliseconds, int(each.is_held)) for each in rest]
            try:
                for process in (onlooker, *victims):
                    _read(process)
                for each, victim in zip(rest, victims, strict=True):
                    outcomes.append(_kill(each, victim, onlooker))
                    print(outcomes[-1], flush=True)
                    if outcomes[-1].onlooker_lost:
                        break
            finally:
                for process in (onlooker, *victims):
                    process.kill()
                    process.wait()
    return outcomes


def _kill(kill: Kill, victim: subprocess.Popen[str], onlooker: subprocess.Popen[str]) -> Outcome:
    assert victim.stdin is not None
    victim.stdin.write("go\n")
    victim.stdin.flush()
    _read(victim)
    at = time.time()
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    gone = time.time() - at
    time.sleep(max(0.0, kill.milliseconds / 1e3 + SEES_WITHIN - gone))
    lost = onlooker.poll() is not None
    after = round(1e3 * (float(_read(onlooker)) - at)) if lost else None
    return Outcome(kill, lost, after, round(1e3 * gone))


def _start(variables: dict[str, str], role: str, *arguments: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"bench.orphans.{role}", *map(str, arguments)],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended early")
    return line


if __name__ == "__main__":
    main()
