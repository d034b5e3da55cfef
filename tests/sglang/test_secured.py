"""A real server with an admin key and a certificate, as its operator uses it: the commands on its host, and the page."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eep import cli
from eep.console.api_client import ApiClient
from eep.console.server_files import ServerFiles, read_files
from eep.console.server_trust import trust_certificate
from eep.drill.faults import Target
from eep.drill.sglang_server import FOUR_RANKS, START_WITHIN, Server
from tests.control.store.certificates import Authority, why_no_certificates
from tests.sglang.browser import Browser
from tests.sglang.drills import check_end

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.long,
    pytest.mark.skipif(why_no_certificates() is not None, reason=str(why_no_certificates())),
]

KEY = "secret"
TYPE_KEY = "const k = document.getElementById('key'); k.value = arguments[0]; k.dispatchEvent(new Event('change'))"
TEXT = "return document.getElementById(arguments[0]).textContent"
TILE = "const tile = document.querySelector('.tile[data-rank=\"2\"]'); "
READY = "return document.querySelectorAll('.tile[data-state=\"ready\"]').length === 4"
PRESS = f"{TILE} [...tile.querySelectorAll('button')].find(each => each.textContent === 'replace').click()"


@pytest.fixture(scope="module")
def server(sglang: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("secured")
    signed = Authority(place / "ca").sign("server", alternative="DNS:model.example")
    arguments = (
        *(*FOUR_RANKS, "--eep-timeout-ms", "10000", "--eep-faults", "on", "--enable-metrics"),
        *("--admin-api-key", KEY, "--ssl-certfile", str(signed.certificate), "--ssl-keyfile", str(signed.key)),
    )
    running = Server(model, arguments, place / "log", directory=place / "d")
    running.launch()
    try:
        wait_until_ready(running)
        yield running
        running.stop()
        check_end(running)
    finally:
        running.kill()


def files_of(server: Server) -> ServerFiles:
    assert server.directory is not None
    found = read_files(server.directory)
    assert found is not None
    assert found.certificate is not None
    return found


def client_of(server: Server, key: str = KEY) -> ApiClient:
    files = files_of(server)
    return ApiClient(files.url, key, tls=trust_certificate(str(files.certificate)))


def wait_until_ready(server: Server) -> None:
    end = time.monotonic() + START_WITHIN
    while time.monotonic() < end:
        assert server._process.poll() is None, server.log[-4000:]
        with contextlib.suppress(OSError, ValueError, AssertionError):
            client_of(server).get("/eep/ready?ranks=4")
            return
        time.sleep(0.5)
    raise AssertionError(server.log[-4000:])


class Clients:
    """Requests one after the other, so that the page has something to show."""

    def __init__(self, server: Server, many: int = 4) -> None:
        self._client, self._ending = client_of(server), threading.Event()
        self.answers = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(many)]

    def __enter__(self) -> Clients:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for each in self._threads:
            each.join(120)

    def _run(self) -> None:
        asked = {"text": "Say 1", "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
        while not self._ending.is_set():
            self._client.post("/generate", asked, within=100.0)
            self.answers += 1


def test_the_commands_on_its_host_trust_its_certificate_and_want_the_key(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--dir", str(server.directory)]
    monkeypatch.delenv("EEP_ADMIN_KEY", raising=False)
    assert cli.main(["drain", *here]) == 1
    assert "wants a key" in capsys.readouterr().err
    monkeypatch.setenv("EEP_ADMIN_KEY", KEY)
    assert cli.main(["drain", *here]) == 0
    assert cli.main(["undrain", *here]) == 0
    assert cli.main(["rank", "role", "3", "experts", *here]) == 0
    assert cli.main(["rank", "role", "3", "both", *here]) == 0
    assert cli.main(["evidence", "a-note", "--rank", "1", "--severity", "info", *here]) == 0
    assert cli.main(["scale", "9", *here]) == 3
    assert cli.main(["status", "--url", files_of(server).url]) == 1
    assert "--ca-file" in capsys.readouterr().err


def test_the_page_asks_with_the_key_and_shows_a_kill_what_it_cost_and_what_was_asked(server: Server) -> None:
    with Clients(server) as clients, Browser() as browser:
        browser.open(f"{files_of(server).url}/eep/")
        browser.wait_for(f"{TEXT}.includes('wants its admin key')", "trouble")
        browser.run(TYPE_KEY, KEY)
        browser.wait_for(READY)
        browser.run(PRESS)
        browser.wait_for(f"{TEXT}.includes('replace 2 done')", "operations", within=120)
        browser.wait_for(READY)
        browser.wait_for(f"{TEXT}.includes('MiB')", "tiers", within=60)
        browser.wait_for("return parseInt(document.getElementById('rate').textContent) > 0")
        browser.keep("page.png")
        assert server.directory is not None
        Target(server.directory).kill(1)
        browser.wait_for("return document.querySelectorAll('.tile[data-state=\"ready\"]').length < 4")
        browser.wait_for(f"{TEXT}.includes('rank 1 lost')", "change", within=60)
        browser.keep("page-kill.png")
        browser.wait_for(READY, within=120)
        before = clients.answers
        browser.wait_for("return parseInt(document.getElementById('rate').textContent) > 0")
    assert clients.answers > before > 0
