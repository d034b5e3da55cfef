from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.drills import Drilled, check_end

# Room for every expert on every rank: one rank alone can serve.
ARGUMENTS = (
    *(*FOUR_RANKS, "--eep-redundant-experts", "48", "--eep-timeout-ms", "20000", "--enable-metrics"),
    *("--log-requests-format", "json"),
)


@pytest.fixture(scope="package")
def roomy(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of this folder. It leaves nothing behind."""
    place = tmp_path_factory.mktemp("roomy")
    (place / "metrics").mkdir()
    environment = {
        "PROMETHEUS_MULTIPROC_DIR": str(place / "metrics"),
        "EEP_STEP_RECORD": str(place / "steps"),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "compiled"),
        # SGLang 0.5.21 keeps a state of each request with n > 1 for ever, fault or not, and would wait for it in the end.
        "SGL_FORCE_SHUTDOWN": "1",
    }
    server = Server(model, ARGUMENTS, place / "log", environment, place / "d")
    with server:
        yield server
    check_end(server)


@pytest.fixture(scope="package")
def drilled(roomy: Server) -> Drilled:
    return Drilled.of(roomy)
