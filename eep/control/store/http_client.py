"""A small HTTP/1.1 client: one POST per connection, JSON in, a stream of JSON objects out. Just what etcd needs."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

MAX_BODY = 64 << 20
"""Far above any answer to what we ask; a peer that sends more is not what it should be."""
MAX_LINE = 64 << 10


class HttpError(Exception):
    """The server could not be reached, or does not speak HTTP as it should."""


class CertificateError(HttpError):
    """One end does not trust the certificate of the other; ``is_ours`` says whether it is that of this client."""

    def __init__(self, reason: str, *, is_ours: bool) -> None:
        super().__init__(reason)
        self.is_ours = is_ours


@asynccontextmanager
async def post(
    url: str, body: Any, *, headers: Mapping[str, str], tls: ssl.SSLContext | None, connect_within: float | None = None
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """Send ``body`` as JSON; gives the status and the lines of the answer as they come. All other deadlines are the
    caller's."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"an endpoint is http(s)://host:port, got {url!r}")
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(connect_within):
            reader, writer = await asyncio.open_connection(
                parts.hostname,
                port,
                ssl=(tls or ssl.create_default_context()) if secure else None,
                limit=MAX_LINE,
            )
    except TimeoutError as error:
        raise HttpError(f"{parts.hostname}:{port} could not be reached within {connect_within} s") from error
    except ssl.SSLCertVerificationError as error:
        raise CertificateError(
            f"the certificate of {parts.hostname}:{port} is not trusted ({error.verify_message})", is_ours=False
        ) from error
    except (OSError, ssl.SSLError) as error:
        raise HttpError(f"{parts.hostname}:{port} cannot be reached: {error}") from error
    try:
        _keep_alive(writer)
        writer.write(_request(parts.path, parts.netloc, headers, msgspec.json.encode(body)))
        await writer.drain()
        status, answer_headers = await _read_head(reader)
        yield status, _lines(_body(reader, answer_headers))
    except ssl.SSLError as error:
        if not _is_about_our_certificate(error):
            raise HttpError(f"{parts.hostname}:{port} broke off: {error}") from error
        raise CertificateError(
            f"{parts.hostname}:{port} does not accept the certificate of its client ({error.reason})", is_ours=True
        ) from error
    except (OSError, EOFError, ValueError) as error:
        raise HttpError(f"{parts.hostname}:{port} broke off: {error or type(error).__name__}") from error
    finally:
        writer.transport.abort()


def _is_about_our_certificate(error: ssl.SSLError) -> bool:
    """With TLS 1.3 a server says so only after its client takes the connection for good."""
    return any(word in str(error.reason) for word in ("CERTIFICATE", "UNKNOWN_CA"))


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """A watch may be silent for hours; the kernel finds out within seconds when the other host is gone."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _request(path: str, host: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    words = (await reader.readline()).decode("latin-1").split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise ValueError("the server does not answer with HTTP")
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(words[1]), headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while (size := int((await reader.readline()).strip() or b"0", 16)) > 0:
            if size > MAX_BODY:
                raise ValueError(f"a chunk of {size} bytes is too large")
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        return
    left = int(headers.get("content-length", "0"))
    if left > MAX_BODY:
        raise ValueError(f"an answer of {left} bytes is too large")
    yield await reader.readexactly(left)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines; the gateway puts one JSON object on each."""
    held = b""
    async for piece in pieces:
        held += piece
        if len(held) > MAX_BODY:
            raise ValueError("a line of the answer is too large")
        *whole, held = held.split(b"\n")
        for line in whole:
            if line.strip():
                yield line
    if held.strip():
        yield held
