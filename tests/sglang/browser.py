"""A headless Chromium that is driven over the WebDriver protocol, by the driver that Debian has for it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

_ANSWERS_WITHIN = 60.0
SHOTS = "EEP_TEST_SCREENSHOTS"
"""A directory in which tests leave what they saw, for people."""


class Browser:
    """``with Browser() as browser``: skips the test where there is no Chromium or no driver."""

    def __enter__(self) -> Browser:
        found = [shutil.which(name) for name in ("chromium", "chromedriver")]
        if None in found:
            pytest.skip("needs Debian's chromium and chromium-driver")
        self._place = tempfile.TemporaryDirectory(prefix="browser-")  # for what Chromium leaves behind
        places = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TMPDIR"), self._place.name)
        self._driver = subprocess.Popen(
            [str(found[1]), "--port=0"], stdout=subprocess.PIPE, text=True, env={**os.environ, **places}
        )
        try:
            self._url = f"http://127.0.0.1:{self._port()}"
            options = {
                "binary": str(found[0]),
                "args": [
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--window-size=1280,1450",
                ],
            }
            # Certificates of tests are signed by no one whom Chromium knows.
            wanted = {
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
                "acceptInsecureCerts": True,
            }
            self._session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        except BaseException:
            self._driver.kill()
            self._driver.wait()
            self._place.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", f"/session/{self._session}")
        finally:
            self._driver.terminate()
            self._driver.communicate(timeout=30)
            self._place.cleanup()

    def open(self, url: str) -> None:
        self._of_session("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a piece of JavaScript returns in the page."""
        return self._of_session("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script: str, *arguments: Any, within: float = 30.0) -> Any:
        """What it returns as soon as that is true."""
        end = time.monotonic() + within
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, f"the page did not come to: {script}"
            time.sleep(0.02)
        return found

    def complaints(self) -> list[str]:
        """What the console of the page has said, but for what it says by the by."""
        entries = self._of_session("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def keep(self, name: str) -> None:
        """What it shows now, as a picture, if anyone wants that."""
        if os.environ.get(SHOTS):
            picture = base64.b64decode(self._of_session("GET", "/screenshot"))
            (Path(os.environ[SHOTS]) / name).write_bytes(picture)

    def _of_session(self, method: str, path: str, body: Any = None) -> Any:
        return self._ask(method, f"/session/{self._session}{path}", body)

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if "successfully on port " in line:
                return int(line.rsplit("on port ", 1)[1].strip(" .\n"))
        raise AssertionError("the driver ended without a port")

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWERS_WITHIN) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:2000]) from None
