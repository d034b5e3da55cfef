"""PyTorch's own tests of torch.distributed, against the backend eep. ``torch_suite.toml`` lists what runs, and what does not.

A case that runs must pass: torch's skipping it is a failure too.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process_group.torch_suite import Runner

LIST: dict[str, Any] = tomllib.loads((Path(__file__).parent / "torch_suite.toml").read_text())
RUN = [(group["as"], case) for group in LIST["run"] for case in group["cases"]]
SKIPPED = [case for group in LIST["skipped"] for case in group["cases"]]

pytestmark = [
    pytest.mark.skipif(
        not torch.__version__.startswith(LIST["torch"]),
        reason=f"the list of PyTorch's tests is that of torch {LIST['torch']}, this is {torch.__version__}",
    ),
    pytest.mark.timeout(900),  # the first case starts the runner, which imports the tests
]


class Tally:
    """Counts the cases that pass, and says so at the end of the run."""

    def __init__(self) -> None:
        self.ran, self.passed = 0, 0

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"PyTorch's own tests against eep: {self.passed} passed of {self.ran} that ran; {LIST['passes']} are to pass"
        )


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Tally:
    counted = Tally()
    request.config.pluginmanager.register(counted)
    return counted


@pytest.fixture(scope="module")
def runner() -> Iterator[Callable[[str], Runner]]:
    """A runner under the name of a backend, started when it is first asked for."""
    with contextlib.ExitStack() as stack:
        started: dict[str, Runner] = {}

        def start(guise: str) -> Runner:
            if guise not in started:
                started[guise] = stack.enter_context(Runner(guise, LIST["world_size"]))
            return started[guise]

        yield start


@pytest.mark.parametrize(("guise", "case"), RUN, ids=[case for _, case in RUN])
def test_case(runner: Callable[[str], Runner], tally: Tally, guise: str, case: str) -> None:
    tally.ran += 1
    outcome = runner(guise).run(case)
    assert outcome.how == "passed", f"{case} {outcome.how}: {outcome.why}"
    tally.passed += 1


def test_no_fewer_pass_than_before(tally: Tally) -> None:
    if tally.ran < len(RUN):
        pytest.skip(f"only {tally.ran} of {len(RUN)} cases were chosen to run")
    assert tally.passed >= LIST["passes"]


def test_every_case_is_listed_once(runner: Callable[[str], Runner]) -> None:
    listed = [*(case for _, case in RUN), *SKIPPED]
    assert len(set(listed)) == len(listed)
    there = runner(LIST["run"][0]["as"]).cases()
    unlisted = [case for case in there if not any(fnmatchcase(case, pattern) for pattern in listed)]
    assert not unlisted, "add these to torch_suite.toml, under [[run]] if they pass"
    gone = [pattern for pattern in listed if not any(fnmatchcase(case, pattern) for case in there)]
    assert not gone, "these are in torch_suite.toml, but not in torch"
