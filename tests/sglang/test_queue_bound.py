"""The real server with a bound on open requests refuses one more, and serves those that it has."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eep.drill.faults import Target
from eep.drill.sglang_server import Server
from tests.sglang.drills import check_end, wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

BOUND = 5
ARGUMENTS = (
    *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--ep-backend", "eep"),
    *(
        "--eep-timeout-ms",
        "60000",
        "--eep-stall-timeout-s",
        "0",
        "--max-running-requests",
        "2",
        "--max-queued-requests",
        str(BOUND - 2),
    ),
)


def status_of(server: Server, prompt: str) -> tuple[int, str]:
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    asked = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_more_requests_than_may_be_open_are_refused_at_once(sglang: None, model: Path, tmp_path: Path) -> None:
    with (
        Server(model, ARGUMENTS, tmp_path / "log", directory=tmp_path / "d") as server,
        ThreadPoolExecutor(8) as clients,
    ):
        status_of(server, "Say 0")
        ranks = [rank.pid for rank in Target(tmp_path / "d").ranks().values() if rank.pid is not None]
        assert len(ranks) == 2
        for pid in ranks:  # so that what is open stays open
            os.kill(pid, signal.SIGSTOP)
        try:
            waits = [clients.submit(status_of, server, f"Say {number}") for number in range(8)]
            wait_for(lambda: sum(each.done() for each in waits) >= 8 - BOUND, "those beyond the bound are refused")
            refused = [each.result() for each in waits if each.done()]
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)
        assert [status for status, _ in refused] == [503] * (8 - BOUND)
        assert all("try again" in said for _, said in refused), refused
        assert sorted(each.result()[0] for each in waits) == [200] * BOUND + [503] * (8 - BOUND)
        assert status_of(server, "Say 9")[0] == 200, "there is room again"
    check_end(server)
