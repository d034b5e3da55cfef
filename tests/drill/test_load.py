"""A client of a server that is made up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eep.drill.load import ask


class Server(BaseHTTPRequestHandler):
    """Streams three tokens: one, then two."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for ids, total in (([4], 1), ([5, 6], 3)):
            self.wfile.write(
                f'data: {{"output_ids": {ids}, "meta_info": {{"completion_tokens": {total}}}}}\n\n'.encode()
            )
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_client_tells_how_far_its_answer_is(url: str) -> None:
    seen: list[int] = []
    answer = ask(url, [1, 2], 3, rank=2, seen=seen.append)
    assert (answer.tokens, answer.problem, answer.rank) == ([4, 5, 6], "", 2)
    assert seen == [1, 3]


def test_an_answer_that_is_too_short_has_failed(url: str) -> None:
    assert ask(url, [1, 2], 4).problem == "3 tokens instead of 4"
