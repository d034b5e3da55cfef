from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.drills import check_end

# The slots that are there by default: the loss of a rank makes others bring in what it had, two lost ranks make all wait.
# Without overlap scheduling, which the other servers have; and of an answer it sends what is new, where they send all of it.
# With code that clients send: by that, a test ends ranks. Prompts of more than 8 tokens cross ranks in portions.
ARGUMENTS = (
    *(*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-stall-timeout-s", "25", "--eep-faults", "on"),
    *(
        "--eep-portion-tokens",
        "8",
        "--disable-overlap-schedule",
        "--incremental-streaming-output",
        "--enable-custom-logit-processor",
    ),
)


@pytest.fixture(scope="package")
def plain(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of this folder. It leaves nothing behind: one rank of stock SGLang leaves files in shared
    memory, which the plugin removes."""
    place = tmp_path_factory.mktemp("plain")
    server = Server(model, ARGUMENTS, place / "log", directory=place / "d")
    with server:
        yield server
    check_end(server)
