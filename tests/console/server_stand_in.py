"""A small HTTP server with EEP's routes, which remembers what it was asked."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from tests.console.test_status_table import STATUS

LINE = {"time": 1.0, "host": "h", "phase": "RUN", "epoch": 3, "rank": None, "incarnation": None, "cause": "because"}
LINE |= {"evidence": "", "duration": None, "operation": "view-3"}


def event(ident: str, epoch: int) -> bytes:
    """As a stream of events has it."""
    return f"id: {ident}\ndata: {json.dumps({**LINE, 'epoch': epoch})}\n\n: \n\n".encode()


OPERATION = {"reason": "6 ranks serve", "undone": []}


class Routes(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, Any, str | None]]] = []
    states: ClassVar[list[str]] = ["running", "done"]
    status: ClassVar[dict[str, Any]] = STATUS
    tokens: ClassVar[list[str | None]] = []
    streams: ClassVar[list[bytes | int]] = []
    """What the next readers of events get: the end of a stream that is cut, or a status."""

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.asked.append((self.path, body, self.headers.get("Authorization")))
        self.tokens.append(self.headers.get("X-EEP-Token"))
        if self.headers.get("Authorization") != "Bearer secret":
            self._send(401, b'{"error": "Unauthorized"}')
        elif self.path == "/eep/status":
            self._send(200, json.dumps(self.status).encode())
        elif self.path.startswith("/eep/apply"):
            state = self.states[0] if len(self.states) == 1 else self.states.pop(0)
            self._send(200, json.dumps({"state": state, **OPERATION}).encode())
        elif self.path == "/eep/evidence":
            self._send(200, json.dumps({"reaction": "fence", "ranks": [2, 3]}).encode())
        elif self.path.startswith("/eep/events?follow"):
            self._send(200, json.dumps([{"id": "x.1", **LINE}]).encode())
        elif self.path.startswith("/eep/events"):
            self._stream()
        elif self.path == "/plain":
            self._send(200, b"<html>")
        elif self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
        else:
            self._send(404, b'{"error": {"message": "there is no such thing"}}')

    def _stream(self) -> None:
        """As a server does that is killed, or whose proxy is: the answer has no end of its own."""
        told = self.streams.pop(0) if self.streams else 404
        if isinstance(told, int):
            self._send(told, b"{}")
            return
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        self.wfile.write(b"retry: 1000\n\n" + told)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", port), Routes)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
