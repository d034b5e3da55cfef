"""Asks a server over HTTP, with the key that its routes want.

The key is for that server alone: no proxy gets it, and no other place that the server names."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from eep.console.server_files import TOKEN_HEADER

KEY = "EEP_ADMIN_KEY"
"""The variable with the key."""
_MOST_BYTES = 64 << 20


class ApiError(ValueError):
    """The server refused. Its text says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class ApiClient:
    """``token``: shows that the caller is of the server's user, on its host. ``tls``: which certificates are accepted; those
    that this machine trusts, if it is None."""

    def __init__(self, url: str, key: str = "", *, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.url = _checked(url)
        self._headers = {"Content-Type": "application/json"}
        if key:
            if not (key.isascii() and key.isprintable()):
                raise ValueError("the admin key has characters that HTTP cannot carry; look at its file")
            self._headers["Authorization"] = f"Bearer {key}"
        if token:
            self._headers[TOKEN_HEADER] = token
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls), _Stay()
        )

    def get(self, path: str, within: float = 15.0) -> Any:
        return self._ask(path, None, within)

    def post(self, path: str, body: object, within: float) -> Any:
        return self._ask(path, json.dumps(body).encode(), within)

    def lines(self, path: str, silent_for: float) -> Iterator[str]:
        """The lines of an answer as they come. Ends when the answer does; OSError if it is silent for so long."""
        with self._open(path, None, silent_for) as stream:
            try:
                for raw in stream:
                    yield raw.decode(errors="replace").rstrip("\r\n")
            except http.client.HTTPException as error:
                raise self._cut(error) from None

    def _ask(self, path: str, body: bytes | None, within: float) -> Any:
        with self._open(path, body, within) as answer:
            try:
                return json.loads(answer.read(_MOST_BYTES))
            except http.client.HTTPException as error:
                raise self._cut(error) from None
            except ValueError:
                raise ConnectionError(f"what answers at {self.url} is no server with EEP") from None

    def _open(self, path: str, body: bytes | None, within: float) -> Any:
        request = urllib.request.Request(self.url + path, body, self._headers)
        try:
            return self._opener.open(request, timeout=within)
        except urllib.error.HTTPError as error:
            raise ApiError(error.code, self._why(error)) from None
        except urllib.error.URLError as error:
            raise ConnectionError(f"no server answers at {self.url}: {_reason(error.reason)}") from None
        except http.client.HTTPException as error:
            raise self._cut(error) from None

    def _cut(self, error: http.client.HTTPException) -> ConnectionError:
        return ConnectionError(f"the answer of {self.url} broke off ({type(error).__name__})")

    def _why(self, error: urllib.error.HTTPError) -> str:
        if error.code == 401:
            return f"{self.url} wants a key: set {KEY} or give --key-file"
        if error.code in (301, 302, 303, 307, 308):
            return f"{self.url} sends its callers to {error.headers.get('Location')}: give that with --url, if you trust it"
        text = error.read(1 << 16).decode(errors="replace")
        try:
            return str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"{self.url} answers with status {error.code}: {text[:200]}"


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_good = is_good and not (parts.username or parts.query or parts.fragment)
    except ValueError:  # of the port, or of the brackets of an address
        is_good = False
    if not is_good or not url.isprintable() or " " in url:
        raise ValueError(f"--url {url}: write it like http://127.0.0.1:30000")
    return url.rstrip("/")


def _reason(error: object) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); name the CA that has signed it with --ca-file"
    return str(error)
