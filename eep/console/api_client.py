"""Asks a server over HTTP, with the key that its routes want."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEY = "EEP_ADMIN_KEY"
"""The variable with the key."""
URL_FILE = "url"
"""In a server's private directory: where it serves HTTP."""
_MOST_BYTES = 64 << 20


class ApiError(ValueError):
    """The server refused. Its text says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ApiClient:
    def __init__(self, url: str, key: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url}: write it like http://127.0.0.1:30000")
        self.url, self._key = url.rstrip("/"), key

    def get(self, path: str, within: float = 15.0) -> Any:
        with self._open(path, None, within) as answer:
            return json.loads(answer.read(_MOST_BYTES))

    def post(self, path: str, body: object, within: float) -> Any:
        with self._open(path, json.dumps(body).encode(), within) as answer:
            return json.loads(answer.read(_MOST_BYTES))

    def events(self, after: str, silent_for: float = 60.0) -> Iterator[tuple[str, str]]:
        """The id and the line of each event after an id. Ends when the server does; OSError if it is silent for so long."""
        ident = after
        with self._open(f"/eep/events?after={ident}", None, silent_for) as stream:
            for raw in stream:
                line = raw.decode().rstrip("\n")
                if line.startswith("id: "):
                    ident = line[4:]
                elif line.startswith("data: "):
                    yield ident, line[6:]

    def _open(self, path: str, body: bytes | None, within: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            return urllib.request.urlopen(request, timeout=within)
        except urllib.error.HTTPError as error:
            raise ApiError(error.code, self._why(error)) from None
        except urllib.error.URLError as error:
            raise ConnectionError(f"no server answers at {self.url}: {error.reason}") from None

    def _why(self, error: urllib.error.HTTPError) -> str:
        if error.code == 401:
            return f"{self.url} wants a key: set {KEY} or give --key-file"
        text = error.read(1 << 16).decode(errors="replace")
        try:
            return str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"{self.url} answers with status {error.code}: {text[:200]}"


def read_url(directory: Path) -> str | None:
    """Where the server of a private directory serves HTTP; None if it does not say so."""
    try:
        return (directory / URL_FILE).read_text().strip() or None
    except OSError:
        return None
