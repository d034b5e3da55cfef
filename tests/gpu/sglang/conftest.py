"""Real servers whose ranks share one GPU, under an MPS daemon of the tests' own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from eep.drill.devices import CUDA, Device
from eep.drill.load import Load
from eep.drill.models.checkpoint import make_model
from eep.drill.sglang_server import FOUR_RANKS, ONE_RANK, Server
from eep.drill.token_certainty import clear_prompts
from tests.sglang.drills import Drilled

SLOTS_FOR_ALL = ("--eep-redundant-experts", "48")
"""Every rank holds every expert, so that the last one can serve."""
AS_IN_WARMING_UP = [[first, *[1] * (length - 1)] for first in range(1, 24) for length in (2, 5, 17)]
"""Prompts that begin as those do with which a rank warms up."""
A_SPARE_EACH = ("--eep-spares", "4")


@pytest.fixture(scope="session", autouse=True)
def sglang() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: these tests need it, and its kernels for CUDA")


@pytest.fixture(scope="session")
def model(sglang: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / CUDA.model, size=CUDA.model)


@pytest.fixture(scope="session")
def mps(sglang: None) -> Iterator[dict[str, str]]:
    with CUDA.prepared() as environment:
        yield environment


@dataclass(frozen=True)
class Alone:
    """What one rank says, without ``--ep-backend eep``."""

    prompts: list[list[int]]
    wanted: list[list[int]]
    beginnings: Load
    """The clearest of those that begin as in warming up."""


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    with Server(model, ONE_RANK, tmp_path_factory.mktemp("one") / "log", device=CUDA) as server:
        answers = Drilled.of(server, ranks=1, prompts=16, tokens=64)
        clear = clear_prompts(server.url, AS_IN_WARMING_UP, 8, 32)
        beginnings = Load.with_reference(server.url, clear, tokens=32)
    assert server.leftovers() == []
    assert len({tuple(each) for each in answers.wanted}) == len(answers.prompts), (
        "answers are to differ from each other"
    )
    return Alone(answers.prompts, answers.wanted, beginnings)


@contextmanager
def serving(
    model: Path, place: Path, environment: dict[str, str], *flags: str, device: Device = CUDA
) -> Iterator[Server]:
    """A server that leaves nothing behind."""
    (place / "metrics").mkdir()
    environment = {**environment, "PROMETHEUS_MULTIPROC_DIR": str(place / "metrics")}
    server = Server(
        model,
        (*flags, "--eep-timeout-ms", "20000", "--enable-metrics"),
        place / "log",
        environment,
        place / "d",
        device,
    )
    with server:
        yield server
    assert server.leftovers() == []


@pytest.fixture(scope="module")
def bounded(model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    """The slots that there are by default: tokens cross ranks, and a loss makes others bring in experts."""
    with serving(model, tmp_path_factory.mktemp("bounded"), mps, *FOUR_RANKS, *A_SPARE_EACH) as server:
        yield Drilled.of(server, prompts=8, tokens=64, continued=True)


@pytest.fixture(scope="module")
def roomy(model: Path, mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    place = tmp_path_factory.mktemp("roomy")
    with serving(model, place, mps, *FOUR_RANKS, *SLOTS_FOR_ALL, *A_SPARE_EACH) as server:
        yield Drilled.of(server, prompts=8, tokens=64, continued=True)
