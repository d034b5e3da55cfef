"""Asks a server over HTTP, with the key that its routes want.

The key is for that server alone: no proxy gets it, and no other place that the server names. What answers may be no server,
or one that hangs: every answer has an end, and one of another form is an error that says so.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from eep.console.server_files import TOKEN_HEADER
from eep.console.timely_answer import TimelyAnswer

KEY = "EEP_ADMIN_KEY"
"""The variable with the key."""
_MOST_BYTES = 64 << 20
_LONGEST_LINE = 1 << 20


class ApiError(ValueError):
    """The server refused. Its text says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ApiClient:
    """``token``: shows that the caller is of the server's user, on its host. ``tls``: which certificates are accepted; those
    that this machine trusts, if it is None."""

    def __init__(self, url: str, key: str = "", *, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.url = url.rstrip("/")
        self._place, self._tls, self._has_key = _checked(url), tls, bool(key)
        self._headers = {"Content-Type": "application/json"}
        if key:
            if not (key.isascii() and key.isprintable()):
                raise ValueError("the admin key has characters that HTTP cannot carry; look at its file")
            self._headers["Authorization"] = f"Bearer {key}"
        if token:
            self._headers[TOKEN_HEADER] = token

    def get(self, path: str, within: float = 15.0, shape: Any = Any) -> Any:
        """What the server answers, if it has the form of ``shape``, a type that msgspec knows."""
        return self._ask(path, None, within, shape)

    def post(self, path: str, body: object, within: float, shape: Any = Any) -> Any:
        return self._ask(path, json.dumps(body).encode(), within, shape)

    def lines(self, path: str, silent_for: float) -> Iterator[str]:
        """The lines of an answer as they come. Ends when the answer does; OSError if it is silent for so long."""
        stream = self._open(path, None, silent_for, lambda: silent_for)
        with stream:
            while True:
                try:
                    raw = stream.readline(_LONGEST_LINE)
                except (OSError, http.client.HTTPException) as error:
                    raise self._failed(error, silent_for) from None
                if not raw:
                    return
                yield raw.decode(errors="replace").rstrip("\r\n")

    def _ask(self, path: str, body: bytes | None, within: float, shape: Any) -> Any:
        until = time.monotonic() + within
        with self._open(path, body, within, lambda: until - time.monotonic()) as answer:
            try:
                found = json.loads(answer.read(_MOST_BYTES))
                msgspec.convert(found, shape, str_keys=True)
                return found
            except (OSError, http.client.HTTPException) as error:
                raise self._failed(error, within) from None
            except (ValueError, OverflowError, RecursionError):
                raise ConnectionError(f"what answers at {self.url} is no server with EEP") from None

    def _open(
        self, path: str, body: bytes | None, within: float, wait: Callable[[], float]
    ) -> http.client.HTTPResponse:
        """``wait``: how many seconds the next read may take."""
        try:
            connection = self._connection(within)
            connection.response_class = partial(TimelyAnswer, wait=wait)  # type: ignore[assignment]
            try:
                connection.request("GET" if body is None else "POST", self._place.path + path, body, self._headers)
                answer = connection.getresponse()
            except BaseException:
                connection.close()
                raise
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error, within) from None
        if answer.status < 300:
            return answer
        with answer:
            raise ApiError(answer.status, self._why(answer))

    def _connection(self, within: float) -> http.client.HTTPConnection:
        host, port = str(self._place.hostname), self._place.port
        if self._place.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=within)
        return http.client.HTTPSConnection(host, port, timeout=within, context=self._tls)

    def _failed(self, error: OSError | http.client.HTTPException, within: float) -> ConnectionError:
        if isinstance(error, ssl.SSLCertVerificationError):
            why = f"its certificate is not trusted ({error.verify_message}); name the CA that has signed it with --ca-file"
            return ConnectionError(f"no server answers at {self.url}: {why}")
        if isinstance(error, TimeoutError):
            return ConnectionError(f"{self.url} did not answer within {within:g} s")
        if isinstance(error, http.client.HTTPException | ConnectionResetError | BrokenPipeError):
            return ConnectionError(f"the answer of {self.url} broke off ({type(error).__name__})")
        return ConnectionError(f"no server answers at {self.url}: {error}")

    def _why(self, answer: http.client.HTTPResponse) -> str:
        if answer.status == 401:
            if self._has_key:
                return f"{self.url} does not accept the key: set {KEY} or give --key-file"
            return f"{self.url} wants a key: set {KEY} or give --key-file"
        if answer.status in (301, 302, 303, 307, 308):
            return f"{self.url} sends its callers to {answer.headers.get('Location')}: give that with --url, if you trust it"
        try:
            text = answer.read(1 << 16).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            text = ""
        try:
            return str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return f"{self.url} answers with status {answer.status}: {text[:200]}"


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url.rstrip("/"))
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_good = is_good and not (parts.username or parts.query or parts.fragment)
    except ValueError:  # of the port, or of the brackets of an address
        is_good = False
    if not is_good or not url.isprintable() or " " in url:
        raise ValueError(f"--url {url}: write it like http://127.0.0.1:30000")
    return parts
