"""In bfloat16 an answer depends on what is computed with it. A context that comes along is the same to the last bit, so that
a request which is alone on its rank, before and after, goes on as if nothing had happened.

That is so if every rank has every expert. Otherwise the sum over the experts of a token is rounded once for each rank that
has some of them, and which rank has which is not the same after a loss, nor for two ranks that ask.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eep.drill.devices import CPU
from eep.drill.sglang_server import FOUR_RANKS, Server
from tests.sglang.lone_requests import check_that_lone_requests_go_on_alike

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
RANKS = 4
EVERY_EXPERT = ("--eep-redundant-experts", "48")


def test_lone_requests_go_on_alike(sglang: None, model: Path, tmp_path: Path) -> None:
    device = CPU.caching()
    device = replace(device, flags=(*device.flags, "--dtype", "bfloat16"))
    server = Server(
        model,
        (*FOUR_RANKS, *EVERY_EXPERT, "--eep-timeout-ms", "10000"),
        tmp_path / "log",
        directory=tmp_path / "d",
        device=device,
    )
    with server:
        check_that_lone_requests_go_on_alike(server, RANKS, (60, 333))
    assert server.leftovers() == []
