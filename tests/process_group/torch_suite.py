"""Runs PyTorch's own tests of torch.distributed against a backend, each case in processes forked from a warm one.

Torch decides when its tests are imported which of them a backend is up to, by the backend's name, and knows only its own.
So they are imported under the name of one of torch's (``BACKEND``), and run on ours (``EEP_TESTED_BACKEND``).

A runner is a process, started by :class:`Runner`: it reads names of cases, and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
"""For a case. Longer than any takes on a busy machine."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended: ``passed``, ``failed`` or ``skipped``, and why."""

    case: str
    how: str
    seconds: float
    why: str = ""


class Runner:
    """A process that runs cases, imported under the name of the backend ``guise``, with ``world_size`` ranks each."""

    def __init__(self, guise: str, world_size: int, backend: str = "eep", hosts: int = 1) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="eep-torch-suite-")
        environment = {
            **os.environ,
            "BACKEND": guise,
            "WORLD_SIZE": str(world_size),
            "EEP_TESTED_BACKEND": backend,
            "EEP_TESTED_HOSTS": str(hosts),
            # Decorators look at these while the tests are imported; each case gets its own.
            "TEMP_DIR": self._place.name,
            "INIT_METHOD": f"file://{self._place.name}/unused",
            # What killed ranks leave behind goes with us.
            "XDG_RUNTIME_DIR": self._place.name,
            "TMPDIR": self._place.name,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(PATIENCE_S)),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        self._log = open(Path(self._place.name) / "log", "w+")  # noqa: SIM115 (closed with the runner)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.process_group.torch_suite import serve; serve()"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def cases(self) -> list[str]:
        """All there are in the installed torch, those of other classes than the suite's as ``class.case``."""
        cases: list[str] = self._ask("?")
        return cases

    def run(self, case: str) -> Outcome:
        """Runs one case. What its ranks have printed is part of the reason of a failure."""
        self._log.seek(0, os.SEEK_END)
        begin = self._log.tell()
        outcome = Outcome(**self._ask(case))
        self._log.seek(begin)
        return (
            outcome
            if outcome.how != "failed"
            else Outcome(**{**asdict(outcome), "why": outcome.why + self._log.read()})
        )

    def close(self) -> None:
        self._pipe_in.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._place.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _pipe_in(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _ask(self, request: str) -> Any:
        assert self._process.stdout is not None
        print(request, file=self._pipe_in, flush=True)
        if not (answer := self._process.stdout.readline()):
            self._log.seek(0)
            raise RuntimeError(f"the runner of PyTorch's tests ended:\n{self._log.read()[-4000:]}")
        return json.loads(answer)


# ---- from here on: in the runner, and in the ranks ----


def serve() -> None:
    """The life of a runner."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # cases print; only answers go where the answers are read
    from tests.process_group import torch_cases

    torch_cases.Cases.setUpClass()
    for line in sys.stdin:
        request = line.strip()
        answer: Any = torch_cases.all_cases() if request == "?" else asdict(run_case(torch_cases.Cases, request))
        print(json.dumps(answer), file=answers)


def run_case(cases: type[unittest.TestCase], name: str) -> Outcome:
    begin = time.monotonic()
    result = unittest.TestResult()
    cases(name).run(result)
    seconds = round(time.monotonic() - begin, 3)
    if trouble := [*result.errors, *result.failures]:
        return Outcome(name, "failed", seconds, "\n".join(text for _, text in trouble))
    if result.skipped:
        return Outcome(name, "skipped", seconds, result.skipped[0][1])
    return Outcome(name, "passed", seconds)


def main() -> int:
    """To look into cases by hand: python -m tests.process_group.torch_suite gloo 4 test_all_reduce_sum ..."""
    guise, world_size, *cases = sys.argv[1:]
    failed = 0
    with Runner(guise, int(world_size)) as runner:
        for case in cases:
            outcome = runner.run(case)
            failed += outcome.how == "failed"
            print(f"{outcome.how:8} {outcome.seconds:6.2f} s  {case}  {outcome.why}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
